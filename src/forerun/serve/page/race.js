// The same request twice, plainly and with a method: how fast each is, and whether the texts are the same.
//
// Run at once each would wait for the other's steps, so by default they run one after the other, and are shown side by
// side again in a replay of both from one start line. The method goes first: some remember texts, and would know it.

import { complete } from "./api.js";
import { byId, figure, h, quoted } from "./dom.js";
import { createSettings } from "./settings.js";
import { tokenClasses } from "./tokens.js";

const PROMPT = "Write a short poem in which every line begins with: The river";
const FAIRNESS =
  "The method runs first, so that it cannot know the plain text; one that remembers texts is faster in a second " +
  "race. Both are watched step by step, which costs plain decoding some of its pace on an accelerator: " +
  "forerun bench measures without.";

export function startRace() {
  const settings = createSettings({ name: "race", prompt: PROMPT, plain: false, temperature: 0.7, seed: "7" });
  settings.seed.required = true;
  settings.seed.placeholder = "needed here";
  const together = h("input", { type: "checkbox", id: "race-together" });
  const send = h("button", { type: "submit", class: "primary", id: "race-send" }, "Race");
  const again = h("button", { type: "button", id: "race-replay", disabled: true }, "Replay both");
  const stop = h("button", { type: "button", id: "race-stop", disabled: true }, "Stop");
  const form = byId("race-form");
  form.append(settings.element,
    h("div", { class: "check" }, together,
      h("label", { for: "race-together" }, "Run both at once (they then share the machine)")),
    h("p", { class: "help" }, FAIRNESS),
    h("div", { class: "actions" }, send, again, stop));
  const lanes = [createLane("plain", "Plain decoding"), createLane("drafted", "With a draft")];
  byId("race-lanes").append(...lanes.map((lane) => lane.element));
  const [problem, verdict] = [byId("race-problem"), byId("race-verdict")];
  let running = null;

  async function race() {
    running = new AbortController();
    const { signal } = running;
    problem.hidden = true;
    verdict.replaceChildren();
    verdict.className = "verdict";
    lanes[1].name(settings.method);
    for (const lane of lanes) lane.reset(settings.length);
    busy(true);
    const runs = [
      () => lanes[1].run(settings.request(), signal),
      () => lanes[0].run(settings.request({ off: true }), signal),
    ];
    try {
      if (together.checked) await Promise.all(runs.map((run) => run()));
      else for (const run of runs) await run();
      judge(verdict, lanes[0].result(), lanes[1].result(), settings.method);
    } catch (error) {
      running.abort(); // the other lane, if it still runs
      if (error.name !== "AbortError") {
        problem.textContent = error.message;
        problem.hidden = false;
      }
    } finally {
      running = null;
      busy(false);
    }
  }

  function busy(yes) {
    send.disabled = yes;
    stop.disabled = !yes;
    again.disabled = yes || lanes.some((lane) => lane.result().steps === 0);
    form.setAttribute("aria-busy", String(yes));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) race();
  });
  stop.addEventListener("click", () => running?.abort());
  again.addEventListener("click", async () => {
    running = new AbortController();
    busy(true);
    await Promise.all(lanes.map((lane) => lane.replay(running.signal)));
    running = null;
    busy(false);
  });
}

function createLane(id, title) {
  const heading = h("h3", {}, title);
  const text = h("div", { class: "tokens lane-text", tabindex: "0", role: "group", "aria-label": `Text of: ${title}` });
  const bar = h("progress", { max: "1", value: "0", "aria-label": `Progress of: ${title}` });
  const values = { rate: h("dd", {}, "–"), perPass: h("dd", {}, "–"), seconds: h("dd", {}, "–") };
  const words = { rate: "tokens/s", perPass: "tokens per pass", seconds: "seconds" };
  const figures = h("dl", { class: "figures" }, ...Object.entries(words).map(([name, label]) => {
    values[name].dataset.figure = name;
    return h("div", {}, h("dt", {}, label), values[name]);
  }));
  const element = h("section", { class: "lane card", id: `lane-${id}`, "aria-label": title },
    heading, figures, bar, text);
  let events = []; // {at, step}: seconds after the request
  let written = "";
  let longest = 1;

  /** The rate counts from the first tokens on: reading the prompt is no decoding, and the second finds it read. */
  function show(upTo) {
    const seen = events.slice(0, upTo);
    const tokens = seen.reduce((sum, { step }) => sum + step.tokens.length, 0);
    const elapsed = seen.length ? seen.at(-1).at - seen[0].at : 0;
    const rate = elapsed > 0 ? (tokens - seen[0].step.tokens.length) / elapsed : null;
    values.rate.textContent = figure(rate, 1);
    values.perPass.textContent = figure(seen.length ? tokens / seen.length : null);
    values.seconds.textContent = figure(seen.length ? seen.at(-1).at : null);
    bar.value = tokens / longest;
    return { rate, tokens };
  }

  function append({ step }) {
    for (const token of step.tokens) text.append(h("span", { class: tokenClasses(token) }, token.text));
    text.scrollTop = text.scrollHeight;
  }

  return {
    element,
    name(method) {
      heading.textContent = `With ${method}`;
    },
    reset(tokens) {
      [events, written, longest] = [[], "", tokens];
      text.replaceChildren();
      show(0);
    },
    async run(request, signal) {
      const begun = performance.now();
      await complete(request, {
        signal,
        onText: (piece) => { written += piece; },
        onStep(step) {
          events.push({ at: (performance.now() - begun) / 1000, step });
          append(events.at(-1));
          show(events.length);
        },
      });
      text.replaceChildren();
      for (const event of events) append(event); // as they are spelled, now that the text is whole
      longest = Math.max(1, show(events.length).tokens); // the text may have ended before its limit
      show(events.length);
    },
    async replay(signal) {
      text.replaceChildren();
      show(0);
      const begun = performance.now();
      for (const [place, event] of events.entries()) {
        const wait = (event.at - events[0].at) * 1000 - (performance.now() - begun);
        if (wait > 0 && !signal.aborted) await new Promise((resolve) => { setTimeout(resolve, wait); });
        append(event);
        show(place + 1);
      }
    },
    result() {
      const ids = events.flatMap(({ step }) => step.tokens.map((token) => token.id));
      const texts = events.flatMap(({ step }) => step.tokens.map((token) => token.text));
      return { steps: events.length, ids, texts, text: written, rate: show(events.length).rate };
    },
  };
}

/** A check mark if the texts are the same, or the first place where they part. */
export function judge(place, plain, drafted, method) {
  const same = plain.text === drafted.text && plain.ids.join() === drafted.ids.join();
  const sign = h("span", { class: "sign", "aria-hidden": "true" }, same ? "✓" : "✗");
  const gain = plain.rate && drafted.rate ? drafted.rate / plain.rate : null;
  place.className = `verdict ${same ? "same" : "different"}`;
  if (same) {
    const faster = gain === null ? "" : ` ${method} wrote ${figure(gain)}× as fast.`;
    place.replaceChildren(sign, h("p", {},
      h("strong", {}, "The texts are identical"), `, all ${plain.ids.length} tokens.${faster}`));
    return;
  }
  const at = firstDifference(plain.ids, drafted.ids);
  const said = (texts) => (at < texts.length ? quoted(texts[at]) : "the end of the text");
  place.replaceChildren(sign, h("p", {}, h("strong", {}, "The texts differ"),
    ` from token ${at + 1} on: plain has ${said(plain.texts)}, ${method} has ${said(drafted.texts)}. `,
    "A rule that is not lossless does this; so can rounding that depends on the batch."));
}

export function firstDifference(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at += 1;
  return at;
}
