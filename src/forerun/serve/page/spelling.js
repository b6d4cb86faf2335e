// Tokens one by one do not always spell the text: a character may lie in several of them, and some vocabularies leave
// out a space that only shows between two. Once the whole text is there, it tells what each token stands for.

const BROKEN = "\ufffd";

export function isSpecial(text) {
  return /^<\|[^<>]*\|>$|^<\/?s>$/u.test(text);
}

/** Sets `text` of tokens to what the text has in their place; whether any changed. Where it cannot tell, it stops. */
export function respell(tokens, text) {
  const written = tokens.filter((token) => token.named && !isSpecial(token.text));
  let changed = false;
  let at = 0;
  for (let place = 0; place < written.length; place += 1) {
    const token = written[place];
    if (!token.text.includes(BROKEN)) {
      const spaced = !text.startsWith(token.text, at) && text.startsWith(` ${token.text}`, at);
      if (!spaced && !text.startsWith(token.text, at)) return changed;
      if (spaced) [token.text, changed] = [` ${token.text}`, true];
      at += token.text.length;
      continue;
    }
    let last = place;
    while (last + 1 < written.length && written[last + 1].text.includes(BROKEN)) last += 1;
    const clean = token.text.indexOf(BROKEN); // letters before the broken character
    const end = last + 1 < written.length ? text.indexOf(written[last + 1].text, at + clean + 1) : text.length;
    if (end < 0) return changed;
    const whole = text.slice(at, end);
    if (whole !== written.slice(place, last + 1).map((part) => part.text).join("")) {
      token.text = whole;
      for (const part of written.slice(place + 1, last + 1)) Object.assign(part, { text: "", part: true });
      changed = true;
    }
    at = end;
    place = last;
  }
  return changed;
}
