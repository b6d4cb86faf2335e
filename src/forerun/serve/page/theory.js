// Expected tokens and speedup by the closed forms, with sliders, and what was measured put on the curve.

import { chart, dots, level, line, mark, note, planeWidth } from "./chart.js";
import { byId, count, figure } from "./dom.js";
import { LONGEST, bestGamma, expectedTokens, speedup } from "./formulas.js";
import { startMonteCarlo } from "./monte_carlo.js";

const SHOWN = 16; // draft lengths on the axis

/** Returns `measured(sums, method)`, which puts a text of the playground on the curves. */
export function startTheory() {
  const sliders = Object.fromEntries(["alpha", "gamma", "cost"].map((name) => [name, byId(`theory-${name}`)]));
  const use = byId("theory-use");
  let point = null;
  const values = () => ({
    alpha: Number(sliders.alpha.value), gamma: Number(sliders.gamma.value), cost: Number(sliders.cost.value),
  });
  const simulation = startMonteCarlo();

  function draw() {
    const now = values();
    const best = bestGamma(now.alpha, now.cost);
    byId("theory-alpha-value").textContent = figure(now.alpha);
    byId("theory-gamma-value").textContent = figure(now.gamma);
    byId("theory-cost-value").textContent = figure(now.cost, now.cost < 0.1 ? 3 : 2);
    byId("theory-expected").textContent = figure(expectedTokens(now.alpha, now.gamma), 3);
    byId("theory-speedup").textContent = `${figure(speedup(now.alpha, now.gamma, now.cost), 3)}×`;
    byId("theory-best").textContent = best === 0 ? "0: do not draft" : `${best}${best === LONGEST ? " or more" : ""}`;
    byId("theory-best-speedup").textContent = `${figure(speedup(now.alpha, best, now.cost), 3)}×`;
    byId("theory-lengths").replaceChildren(lengths(now, best, point));
    byId("theory-acceptances").replaceChildren(acceptances(now, point));
  }

  for (const slider of Object.values(sliders)) {
    slider.addEventListener("input", () => {
      draw();
      simulation.restart(values());
    });
  }
  use.addEventListener("click", () => {
    sliders.alpha.value = String(point.alpha);
    sliders.gamma.value = String(Math.max(1, Math.round(point.depth)));
    if (point.cost !== null) sliders.cost.value = String(point.cost);
    draw();
    simulation.restart(values());
  });
  draw();
  simulation.restart(values());
  let width = planeWidth();
  window.addEventListener("resize", () => {
    if (planeWidth() === width) return;
    width = planeWidth();
    draw();
    simulation.draw();
  });

  return (sums, method) => {
    if (sums.alpha === null) return; // nothing was drafted
    point = { ...sums, method };
    byId("theory-measured").textContent =
      `${method} in the playground: α = ${figure(sums.alpha)} ` +
      `(${sums.accepted} of ${sums.tested} checked drafts held), ` +
      `drafts ${figure(sums.depth, 1)} deep on average, ${figure(sums.tokensPerDraftedStep)} tokens per drafted step` +
      `${sums.cost === null ? "" : `, c = ${figure(sums.cost, 3)}`}.`;
    use.disabled = false;
    draw();
  };
}

const whole = (most) => Array.from({ length: most + 1 }, (_, place) => place);

function lengths({ alpha, gamma, cost }, best, point) {
  const curve = whole(SHOWN).map((length) => [length, speedup(alpha, length, cost)]);
  const measured = point && whole(SHOWN).map((length) => [length, speedup(point.alpha, length, cost)]);
  const top = Math.max(1.5, ...curve.map(([, gain]) => gain), ...(measured ?? []).map(([, gain]) => gain));
  const words = `Speedup by draft length for acceptance ${figure(alpha)} and draft cost ${figure(cost)}: ` +
    `${figure(speedup(alpha, gamma, cost))} times at ${gamma}, ` +
    `best ${figure(speedup(alpha, best, cost))} times at ${best}.`;
  const plane = chart({
    label: words, across: "draft length γ", up: "speedup", xs: [0, SHOWN], ys: [0, top * 1.12],
    xTicks: [0, 4, 8, 12, 16], format: (value) => `${figure(value, 1)}×`,
  });
  level(plane, 1, "even");
  if (measured) line(plane, measured, "measured");
  line(plane, curve, "main");
  dots(plane, curve, "main");
  if (point) {
    const depth = Math.min(point.depth, SHOWN);
    mark(plane, [depth, speedup(point.alpha, depth, cost)], "measured", "", { shape: "diamond" });
    const end = measured.at(-1);
    note(plane, end, "measured", `measured: α = ${figure(point.alpha)}`, end[1] < curve.at(-1)[1]);
  }
  if (best <= SHOWN && best !== gamma) mark(plane, [best, speedup(alpha, best, cost)], "best", `best γ = ${best}`);
  const told = best === gamma ? `γ = ${gamma}, the best` : `γ = ${gamma}`;
  mark(plane, [gamma, speedup(alpha, gamma, cost)], "here", told, { below: best !== gamma });
  return plane.element;
}

function acceptances({ alpha, gamma, cost }, point) {
  const shares = whole(100).map((place) => place / 100);
  const tokens = shares.map((share) => [share, expectedTokens(share, gamma)]);
  const gains = shares.map((share) => [share, speedup(share, gamma, cost)]);
  const words = `Tokens per step by acceptance for drafts of ${count(gamma, "token")}: ` +
    `${figure(expectedTokens(alpha, gamma))} at acceptance ${figure(alpha)}.`;
  const highest = Math.max(gamma + 1, point?.tokensPerDraftedStep ?? 0);
  const plane = chart({
    label: words, across: "acceptance α", up: "tokens per step", xs: [0, 1], ys: [0, highest * 1.08],
    xTicks: [0, 0.2, 0.4, 0.6, 0.8, 1],
  });
  line(plane, gains, "second");
  line(plane, tokens, "main");
  mark(plane, [alpha, expectedTokens(alpha, gamma)], "here", `E = ${figure(expectedTokens(alpha, gamma))}`);
  if (point) {
    const told = `measured: ${figure(point.tokensPerDraftedStep)}`;
    mark(plane, [point.alpha, point.tokensPerDraftedStep], "measured", told, { shape: "diamond", below: true });
  }
  return plane.element;
}

