// Steps with coins instead of models, tossed while one looks on: the closed form appears by itself.

import { planeWidth } from "./chart.js";
import { byId, calmMotion, figure, h, svg } from "./dom.js";
import { distribution, expectedTokens, tossedDrafts, uniforms } from "./formulas.js";

const ROWS = 12; // of the latest rounds
const SEED = 1;
const HEIGHT = 220;
const SIGNS = { accepted: "✓", refused: "✗", unreached: "" };

export function startMonteCarlo() {
  const [strips, histogram, mean, expected, rounds] =
    ["mc-strips", "mc-histogram", "mc-mean", "mc-expected", "mc-rounds"].map(byId);
  const [run, once, reset, speed, said] = ["mc-run", "mc-once", "mc-reset", "mc-speed", "mc-said"].map(byId);
  let settings = null;
  let uniform = uniforms(SEED);
  let tallies = [];
  let latest = [];
  let timer = null;

  function toss(times) {
    for (let turn = 0; turn < times; turn += 1) {
      const accepted = tossedDrafts(settings.alpha, settings.gamma, uniform);
      tallies[accepted + 1] += 1;
      latest.unshift(accepted);
    }
    latest.length = Math.min(latest.length, ROWS);
    draw();
  }

  function draw() {
    const done = tallies.reduce((sum, times) => sum + times, 0);
    const total = tallies.reduce((sum, times, tokens) => sum + times * tokens, 0);
    const middle = done ? total / done : null;
    const squares = tallies.reduce((sum, times, tokens) => sum + times * (tokens - middle) ** 2, 0);
    const error = done > 1 ? Math.sqrt(squares / (done - 1) / done) : null;
    rounds.textContent = String(done);
    mean.textContent = `${figure(middle, 3)}${error === null ? "" : ` ± ${error.toFixed(3)}`}`;
    expected.textContent = figure(expectedTokens(settings.alpha, settings.gamma), 3);
    strips.replaceChildren(...latest.map((accepted) => strip(accepted, settings.gamma)));
    histogram.replaceChildren(bars(tallies, done, settings));
  }

  function tick() {
    // Slow enough to follow one by one, or as many as a screen can show: about 20 frames a second.
    const perSecond = Number(speed.value);
    const frames = Math.min(perSecond, calmMotion() ? 2 : 20);
    toss(Math.max(1, Math.round(perSecond / frames)));
    timer = setTimeout(tick, 1000 / frames);
  }

  function pause() {
    clearTimeout(timer);
    const [done, found, wanted] = [rounds, mean, expected].map((each) => each.textContent);
    if (timer !== null) said.textContent = `${done} rounds: mean ${found}, expected ${wanted}.`;
    timer = null;
    run.textContent = "Run";
  }

  function restart(now) {
    settings = now;
    uniform = uniforms(SEED);
    tallies = Array(settings.gamma + 2).fill(0);
    latest = [];
    draw();
  }

  run.addEventListener("click", () => {
    if (timer !== null) return pause();
    run.textContent = "Pause";
    return tick();
  });
  once.addEventListener("click", () => {
    pause();
    toss(1);
  });
  reset.addEventListener("click", () => {
    pause();
    restart(settings);
  });
  return { restart, draw };
}

/** One round: drafts that held, the one that failed, those never looked at, and the target's token. */
function strip(accepted, gamma) {
  const cells = Array.from({ length: gamma }, (_, place) => {
    const kind = place < accepted ? "accepted" : place === accepted ? "refused" : "unreached";
    return h("i", { class: `cell ${kind}`, "aria-hidden": "true" }, SIGNS[kind]);
  });
  const own = h("i", { class: `cell own ${accepted === gamma ? "bonus" : "corrected"}`, "aria-hidden": "true" }, "+1");
  const sum = h("b", { "aria-label": `${accepted} accepted, ${accepted + 1} written` }, `= ${accepted + 1}`);
  return h("li", {}, ...cells, own, sum);
}

function bars(tallies, done, { alpha, gamma }) {
  const chances = distribution(alpha, gamma);
  const top = Math.max(...chances, ...(done ? tallies.map((times) => times / done) : [])) * 1.1;
  const width = planeWidth();
  const [left, base] = [8, HEIGHT - 34];
  const wide = (width - 2 * left) / (gamma + 1);
  const high = (share) => (share / top) * (base - 12);
  const label = `How many tokens a step commits: bars are the rounds tossed, lines the closed form. ${chances.slice(1)
    .map((chance, place) => `${place + 1}: ${figure(chance)}`).join(", ")}.`;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  picture.append(svg("line", { class: "grid", x1: left, x2: width - left, y1: base, y2: base }));
  for (let tokens = 1; tokens <= gamma + 1; tokens += 1) {
    const x = left + (tokens - 1) * wide;
    const share = done ? tallies[tokens] / done : 0;
    const inset = Math.min(wide * 0.18, 14);
    const bar = { x: x + inset, y: base - high(share), width: wide - 2 * inset, height: high(share), rx: 2 };
    picture.append(svg("rect", { class: "toss", ...bar }));
    const y = base - high(chances[tokens]);
    picture.append(svg("line", { class: "form", x1: x + inset / 2, x2: x + wide - inset / 2, y1: y, y2: y }));
    if (wide > 18 || tokens % 4 === 1) {
      const below = { x: x + wide / 2, y: base + 16, "text-anchor": "middle" };
      picture.append(svg("text", { class: "tick", ...below }, String(tokens)));
    }
  }
  const corner = { x: width - left, y: HEIGHT - 3, "text-anchor": "end" };
  picture.append(svg("text", { class: "axis", ...corner }, "tokens committed by a step"));
  return picture;
}
