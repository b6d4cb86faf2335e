// Elements without a framework: text is always set as text, so nothing a model writes becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** `h("p", {class: "soft", onclick: f, "aria-label": "…"}, "text", child)`; null and false are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element #${id}`);
  return found;
}

/** 3 → "3", 3.14159 → "3.14", nothing measured → "–". */
export function figure(value, digits = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(digits);
}

export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(share * 100)}%` : "–";
}

/** "1 token", "2 tokens". */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** A token as a reader can see it: spaces and line breaks have signs. */
export function visible(text) {
  const signs = { "\r": "␍", "\n": "↵", "\t": "⇥", " ": "·" };
  return text === "" ? "∅" : text.replace(/[\r\n\t ]/gu, (letter) => signs[letter]);
}

/** A token inside a sentence. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "↵")}”`;
}

export function calmMotion() {
  return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
}
