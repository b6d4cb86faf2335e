// A text as its tokens: each can be hovered, focused and chosen. Arrow keys go from token to token, up and down from
// step to step.

import { figure, h, quoted } from "./dom.js";
import { isSpecial } from "./spelling.js";
import { KINDS } from "./steps.js";

let made = 0;

/** The classes of a token's span: how it came about, and whether it is a number, a mark, or the rest of a character. */
export function tokenClasses({ kind, named, text, part }) {
  return `token ${kind}${named ? "" : " id"}${isSpecial(text) ? " special" : ""}${part ? " part" : ""}`;
}

export function createTokens({ label, onShow, onLeave, onChoose }) {
  const tip = h("div", { class: "tip", role: "tooltip", id: `tip-${(made += 1)}`, hidden: true });
  const box = h("div", { class: "tokens", role: "listbox", "aria-orientation": "horizontal", "aria-label": label });
  const spans = [];

  function add(token, step, place) {
    const order = spans.length;
    const span = h("span", {
      class: tokenClasses(token),
      role: "option",
      tabindex: order === 0 ? 0 : -1,
      "aria-selected": "false",
      "aria-label": named(token, place),
      "data-order": order,
      "data-step": place,
    }, ...shown(token.text));
    spans.push({ span, token, step, place });
    box.append(span);
    return span;
  }

  function named(token, place) {
    const words = token.part ? "Rest of a character" : quoted(token.text);
    return `${words}, ${KINDS[token.kind]}, step ${place + 1}`;
  }

  /** A line break is shown and made; the sign is not part of the text that is copied. */
  function shown(text) {
    return text.split(/(\n)/u).filter((part) => part !== "")
      .flatMap((part) => (part === "\n" ? [h("i", { class: "break", "aria-hidden": "true" }), "\n"] : [part]));
  }

  function of(event) {
    const span = event.target.closest?.(".token");
    return span ? spans[Number(span.dataset.order)] : null;
  }

  function show(entry) {
    const { token, step, place, span } = entry;
    const known = token.node === null ? null : step.nodes[token.node].confidence;
    const sure = known === null ? "" : ` · confidence ${figure(known)}`;
    tip.textContent = `Step ${place + 1} · ${KINDS[token.kind]}${sure}`;
    tip.hidden = false;
    span.setAttribute("aria-describedby", tip.id);
    const edge = box.parentElement.getBoundingClientRect();
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(at.left - edge.left, edge.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${at.top - edge.top - tip.offsetHeight - 6}px`;
    onShow(place);
  }

  function hide(entry) {
    tip.hidden = true;
    entry?.span.removeAttribute("aria-describedby");
    onLeave();
  }

  function focus(order) {
    const entry = spans[Math.min(Math.max(order, 0), spans.length - 1)];
    if (!entry) return;
    for (const { span } of spans) span.tabIndex = -1;
    entry.span.tabIndex = 0;
    entry.span.focus();
  }

  function onKey(event) {
    const entry = of(event);
    if (!entry) return;
    const order = Number(entry.span.dataset.order);
    const stepAt = (place) => spans.findIndex((other) => other.place === place);
    const moves = {
      ArrowRight: () => order + 1,
      ArrowLeft: () => order - 1,
      ArrowDown: () => Math.max(stepAt(entry.place + 1), stepAt(entry.place)),
      ArrowUp: () => Math.max(stepAt(entry.place - 1), 0),
      Home: () => 0,
      End: () => spans.length - 1,
    };
    if (event.key in moves) focus(moves[event.key]());
    else if (event.key === "Enter" || event.key === " ") onChoose(entry.place);
    else if (event.key === "Escape") hide(entry);
    else return;
    event.preventDefault();
  }

  box.addEventListener("pointerover", (event) => of(event) && show(of(event)));
  box.addEventListener("pointerout", (event) => of(event) && hide(of(event)));
  box.addEventListener("focusin", (event) => of(event) && show(of(event)));
  box.addEventListener("focusout", (event) => of(event) && hide(of(event)));
  box.addEventListener("click", (event) => {
    const entry = of(event);
    if (!entry) return;
    focus(Number(entry.span.dataset.order));
    onChoose(entry.place);
  });
  box.addEventListener("keydown", onKey);

  return {
    element: h("div", { class: "tokens-frame" }, box, tip),
    add,
    clear() {
      spans.length = 0;
      box.replaceChildren();
      tip.hidden = true;
    },
    /** After tokens were spelled anew. */
    refresh() {
      for (const { span, token, place } of spans) {
        span.replaceChildren(...shown(token.text));
        span.setAttribute("aria-label", named(token, place));
        span.classList.toggle("part", token.part === true);
      }
    },
    /** The step that is looked at is marked, what came after it stands back. */
    mark(place, chosen, written) {
      for (const { span, place: own } of spans) {
        span.classList.toggle("shown", own === place);
        span.classList.toggle("later", written !== null && own > written);
        span.setAttribute("aria-selected", String(own === chosen));
      }
    },
    reveal(place) {
      const entry = spans.findLast((other) => other.place === place);
      if (!entry) return;
      const [outer, inner] = [box.getBoundingClientRect(), entry.span.getBoundingClientRect()];
      if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
      else if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
    },
  };
}
