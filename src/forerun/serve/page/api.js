// Talking to the server this page came from. Every failure is an Error whose message is one sentence for the reader.

import { byId } from "./dom.js";
import { respell } from "./spelling.js";
import { readStep } from "./steps.js";

let key = null; // kept while the page is open, never stored

/** What the server has: {model, version, drafters: [{name, description}], first, chat}. */
export async function information() {
  const answer = await request("page/info", {}, false);
  const info = await answer.json();
  const named = (each) => (typeof each === "string" ? { name: each, description: "" } : each);
  return {
    model: info.model ?? "",
    version: info.version ?? "",
    drafters: (info.drafters ?? []).map(named),
    first: info.default ?? null,
    chat: info.has_chat ?? true,
  };
}

/** Yields the chunks of a streamed completion until the server says that it is done. */
export async function* chunks(path, body, signal) {
  const answer = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The server ended its answer early: try again, or look at its log.");
    const events = (rest + value).split(/\r?\n\r?\n/u);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/u).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data !== "") yield checked(JSON.parse(data));
    }
  }
}

function checked(chunk) {
  if (chunk.error) throw new Error(sentence(chunk.error.message ?? "the server stopped with an error"));
  return chunk;
}

/** Streams a completion: `onStep(step, raw)` as steps arrive, `onText(text)` for each piece. At the end the tokens are
 *  spelled as the whole text has them. Resolves to the usage. */
export async function complete({ path, body }, { signal, onStep, onText }) {
  let usage = null;
  let before = null;
  let whole = "";
  const tokens = [];
  for await (const chunk of chunks(path, body, signal)) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    whole += text;
    if (text) onText(text);
    for (const raw of chunk.forerun?.steps ?? []) {
      const step = readStep(raw, { before, rooted: false });
      if (step.tokens.length === 0) continue;
      before = step.tokens.at(-1);
      tokens.push(...step.tokens);
      onStep(step, raw);
    }
    usage = chunk.usage ?? usage;
  }
  respell(tokens, whole);
  return usage;
}

async function request(path, options, ask = true) {
  for (;;) {
    const headers = { ...options.headers, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer: check that forerun serve is running.");
    }
    if (answer.ok) return answer;
    if (answer.status === 401 && ask && (await askForKey(key !== null))) continue;
    throw await refusal(answer);
  }
}

async function refusal(answer) {
  let message = null;
  try {
    message = (await answer.json()).error?.message;
  } catch {
    message = null; // not in the shape of the API: the status says enough
  }
  if (answer.status === 429) {
    const wait = Number(answer.headers.get("retry-after"));
    message = `${message ?? "the server is busy"}${wait ? ` (in ${wait} s)` : ""}`;
  }
  const error = new Error(sentence(message ?? `the server answered with status ${answer.status}`));
  error.status = answer.status;
  return error;
}

function sentence(words) {
  const first = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?)]$/u.test(first) ? first : `${first}.`;
}

/** Whether there is a key now to try. */
export function askForKey(wrong = false) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-wrong").hidden = !wrong;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" && field.value.trim() !== "";
      if (given) key = field.value.trim();
      field.value = "";
      resolve(given);
    }, { once: true });
  });
}
