// A text with everything known about how it came about: figures, coloured tokens, steps, the tree of each.

import { figure, h, percent } from "./dom.js";
import { createInspector } from "./inspector.js";
import { measure } from "./measure.js";
import { createPlayer } from "./player.js";
import { KINDS } from "./steps.js";
import { createTokens } from "./tokens.js";

const FIGURES = [
  ["tokens", "tokens"],
  ["passes", "target passes"],
  ["tokensPerPass", "tokens per pass"],
  ["rate", "tokens/s"],
  ["accepted", "drafts accepted"],
];

export function createViewer({ label }) {
  let steps = [];
  let chosen = null; // a step that was clicked, or that the player stands at
  let looked = null; // one that the pointer or the focus is on
  let written = null; // while replaying: the last step that is there

  const values = Object.fromEntries(FIGURES.map(([name]) => [name, h("dd", { "data-figure": name }, "–")]));
  const figures = h("dl", { class: "figures" },
    ...FIGURES.map(([name, words]) => h("div", {}, h("dt", {}, words), values[name])));
  const tokens = createTokens({
    label,
    onShow: (place) => look(place),
    onLeave: () => look(null),
    onChoose: (place) => choose(place),
  });
  const player = createPlayer({
    onStep(place) {
      [chosen, written] = [place, place < steps.length - 1 ? place : null];
      update();
      tokens.reveal(place);
    },
    secondsOf: (place) => steps[place].seconds.all,
  });
  const inspector = createInspector();
  const element = h("div", { class: "viewer" }, figures, legend(), tokens.element, player.element, inspector.element);

  function look(place) {
    looked = place;
    update();
  }

  function choose(place) {
    player.pause();
    [chosen, written] = [place, null];
    player.set(place);
    update();
  }

  function update() {
    const place = looked ?? chosen ?? (steps.length ? steps.length - 1 : null);
    tokens.mark(looked ?? chosen, chosen, written);
    if (place === null) inspector.clear();
    else inspector.show(steps[place], place, steps.length);
  }

  /** `rate` is measured by the one who was there; without it the steps' own times are taken. */
  function count(rate) {
    const sums = measure(steps);
    values.tokens.textContent = figure(sums.tokens);
    values.passes.textContent = figure(sums.passes);
    values.tokensPerPass.textContent = figure(sums.tokensPerPass);
    values.rate.textContent = figure(rate ?? (sums.seconds ? sums.tokens / sums.seconds : null), 1);
    values.accepted.textContent = sums.drafted ? `${sums.accepted} of ${sums.drafted}` : "–";
    values.accepted.title = sums.drafted ? `${percent(sums.accepted / sums.drafted)} of what was drafted` : "";
    return sums;
  }

  return {
    element,
    get steps() {
      return steps;
    },
    reset() {
      steps = [];
      [chosen, looked, written] = [null, null, null];
      tokens.clear();
      player.reset();
      inspector.clear();
      for (const value of Object.values(values)) value.textContent = "–";
    },
    add(step, rate = null) {
      const place = steps.push(step) - 1;
      for (const token of step.tokens) tokens.add(token, step, place);
      player.extend(steps.length, chosen === null);
      if (chosen === null) tokens.reveal(place);
      count(rate);
      update();
    },
    count,
    /** Tokens may have been spelled anew, now that the text is whole. */
    refresh() {
      tokens.refresh();
      inspector.clear();
      update();
    },
    load(loaded) {
      this.reset();
      for (const [place, step] of loaded.entries()) for (const token of step.tokens) tokens.add(token, step, place);
      steps = [...loaded];
      player.extend(steps.length, true);
      count(null);
      update();
    },
  };
}

export function legend() {
  const words = {
    accepted: "drafted, and the target agreed",
    corrected: "the target said this instead of the draft",
    bonus: "the target's own token after a draft that held",
    undrafted: "nothing was drafted",
  };
  return h("ul", { class: "legend", "aria-label": "What the marks mean" },
    ...Object.entries(KINDS).map(([kind, name]) =>
      h("li", { title: words[kind] }, h("span", { class: `token ${kind}` }, name))));
}
