// A prompt, a method, and the text with how each token came about.

import { complete } from "./api.js";
import { byId, count, figure, h } from "./dom.js";
import { createSettings } from "./settings.js";
import { asTrace } from "./trace_file.js";
import { createViewer } from "./viewer.js";

const PROMPT = "Write a Python class for a bank account with deposit and withdraw methods.";
const SAY_EVERY = 4000; // milliseconds between figures said aloud

/** `onMeasured(sums, method)` is called with what a finished text adds up to. */
export function startPlayground(onMeasured) {
  const settings = createSettings({ name: "play", prompt: PROMPT, plain: true, temperature: 0, seed: "" });
  const viewer = createViewer({ label: "Generated text, token by token" });
  const form = byId("play-form");
  const send = h("button", { type: "submit", class: "primary", id: "play-send" }, "Generate");
  const stop = h("button", { type: "button", id: "play-stop", disabled: true }, "Stop");
  const save = h("button", { type: "button", id: "play-save", disabled: true }, "Save trace");
  const [problem, said] = [byId("play-problem"), byId("play-said")];
  form.append(settings.element, h("div", { class: "actions" }, send, stop, save));
  byId("play-view").append(viewer.element);
  let running = null;
  let kept = [];

  async function generate() {
    const own = new AbortController();
    const begun = performance.now();
    let spoken = begun;
    let first = null;
    let fallback = "";
    running = own;
    kept = [];
    viewer.reset();
    problem.hidden = true;
    busy(true);
    said.textContent = "Writing.";
    const method = settings.method;
    try {
      await complete(settings.request(), {
        signal: own.signal,
        onText: (text) => { fallback += text; },
        onStep(step, raw) {
          const now = performance.now();
          first ??= { at: now, tokens: step.tokens.length };
          kept.push(raw);
          viewer.add(step, rateSince(first, now));
          if (now - spoken > SAY_EVERY) {
            spoken = now;
            said.textContent = spokenFigures();
          }
        },
      });
      if (viewer.steps.length === 0) {
        const ended = "The model ended the text at once: try another prompt.";
        fail(fallback ? `This server sent no steps, only the text: ${fallback}` : ended);
        return;
      }
      viewer.refresh();
      said.textContent = `Done: ${spokenFigures()}`;
    } catch (error) {
      if (error.name !== "AbortError") fail(error.message);
      else said.textContent = `Stopped: ${spokenFigures()}`;
    } finally {
      running = null;
      busy(false);
      if (viewer.steps.length) onMeasured(viewer.count(first && rateSince(first, performance.now())), method);
    }
  }

  function rateSince(first, now) {
    const seconds = (now - first.at) / 1000;
    const tokens = viewer.steps.reduce((sum, step) => sum + step.tokens.length, 0) - first.tokens;
    return seconds > 0 && tokens > 0 ? tokens / seconds : null;
  }

  function spokenFigures() {
    const tokens = viewer.steps.reduce((sum, step) => sum + step.tokens.length, 0);
    const passes = viewer.steps.length;
    return `${count(tokens, "token")} in ${passes} passes, ${figure(passes ? tokens / passes : null)} per pass.`;
  }

  function fail(sentence) {
    problem.textContent = sentence;
    problem.hidden = false;
    said.textContent = "";
  }

  function busy(yes) {
    send.disabled = yes;
    stop.disabled = !yes;
    save.disabled = yes || kept.length === 0;
    form.setAttribute("aria-busy", String(yes));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) generate();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  save.addEventListener("click", () => {
    const texts = viewer.steps.map((step) => step.tokens.map((token) => token.text));
    const spelled = kept.map((raw, place) => ({ ...raw, committed_texts: texts[place] }));
    const address = URL.createObjectURL(new Blob([asTrace(spelled)], { type: "application/jsonl" }));
    h("a", { href: address, download: "trace.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });
}
