// Step through a text, or let it be written again.

import { calmMotion, h } from "./dom.js";

const SPEEDS = [
  ["1", "1 step/s"], ["3", "3 steps/s"], ["8", "8 steps/s"], ["0.25", "¼ of its pace"], ["live", "as it ran"],
];

/** `onStep(place)` is called with the step to show; `secondsOf(place)` is how long that step took. */
export function createPlayer({ onStep, secondsOf }) {
  let last = -1;
  let at = -1;
  let timer = null;

  const button = (words, sign, action) =>
    h("button", { type: "button", class: "icon", "aria-label": words, title: words, onclick: action }, sign);
  const toggle = () => (timer === null ? start() : pause());
  const play = h("button", { type: "button", class: "play", onclick: toggle }, "Replay");
  const slider = h("input", {
    type: "range", min: "1", max: "1", value: "1", "aria-label": "Step", oninput: () => go(Number(slider.value) - 1),
  });
  const where = h("output", { class: "where" });
  const speed = h("select", { "aria-label": "Replay speed" },
    ...SPEEDS.map(([value, words]) => h("option", { value, selected: value === "3" }, words)));
  const element = h("div", { class: "player", role: "group", "aria-label": "Step through and replay", hidden: true },
    h("div", { class: "buttons" },
      button("First step", "|‹", () => go(0)),
      button("Previous step", "‹", () => go(at - 1)),
      play,
      button("Next step", "›", () => go(at + 1)),
      button("Last step", "›|", () => go(last))),
    slider, where, speed);

  function go(place, keepPlaying = false) {
    if (last < 0) return;
    if (!keepPlaying) pause();
    set(Math.min(Math.max(place, 0), last));
    onStep(at);
  }

  function set(place) {
    at = place;
    slider.value = String(at + 1);
    slider.setAttribute("aria-valuetext", `Step ${at + 1} of ${last + 1}`);
    where.textContent = `${at + 1} / ${last + 1}`;
  }

  function start() {
    play.textContent = "Pause";
    go(at >= last ? 0 : at, true);
    tick();
  }

  function tick() {
    const factor = { live: 1, 0.25: 4 }[speed.value];
    const wait = factor === undefined ? 1 / Number(speed.value) : secondsOf(Math.min(at + 1, last)) * factor;
    timer = setTimeout(() => {
      if (at >= last) return pause();
      go(at + 1, true);
      return tick();
    }, Math.max(wait * 1000, calmMotion() ? 250 : 4));
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Replay";
  }

  return {
    element,
    pause,
    /** How many steps there are; the place stays unless it has to follow. */
    extend(steps, follow) {
      last = steps - 1;
      element.hidden = last < 0;
      slider.max = String(Math.max(steps, 1));
      if (last >= 0) set(follow ? last : Math.min(at, last));
    },
    set,
    reset() {
      pause();
      [last, at] = [-1, -1];
      element.hidden = true;
    },
  };
}
