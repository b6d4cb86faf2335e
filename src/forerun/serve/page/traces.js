// Files of `forerun generate --trace`, chosen or dropped anywhere on the page.

import { byId, count, h } from "./dom.js";
import { readTrace } from "./trace_file.js";
import { createViewer } from "./viewer.js";

/** `onOpened()` is called when a file was dropped, wherever: to bring this view to the front. */
export function startTraces(onOpened) {
  const viewer = createViewer({ label: "Text of the trace, token by token" });
  const [picker, problem, said] = ["trace-file", "trace-problem", "trace-said"].map(byId);
  const [choice, view] = ["trace-choice", "trace-view"].map(byId);
  const select = h("select", { id: "trace-text" });
  choice.append(h("label", { for: "trace-text" }, "Text"), select);
  view.append(viewer.element);
  let texts = [];

  async function open(file) {
    problem.hidden = true;
    said.textContent = "";
    let trace;
    try {
      trace = readTrace(await file.text(), file.name);
    } catch (error) {
      texts = [];
      viewer.reset();
      view.hidden = choice.hidden = true;
      report(error.message);
      return;
    }
    if (trace.warning) report(trace.warning);
    texts = trace.texts;
    select.replaceChildren(...texts.map(({ name, steps }, place) =>
      h("option", { value: place }, `${name} (${count(steps.length, "step")})`)));
    choice.hidden = texts.length === 1;
    view.hidden = false;
    show(0);
    const named = texts[0].steps.some((step) => step.tokens.some((token) => token.named));
    const note = named ? "" : " The file holds no texts, so tokens are shown by their numbers.";
    said.textContent = `${file.name}: ${count(texts[0].steps.length, "step")}.${note}`;
  }

  function report(sentence) {
    problem.textContent = sentence;
    problem.hidden = false;
  }

  function show(place) {
    viewer.load(texts[place].steps);
  }

  select.addEventListener("change", () => show(Number(select.value)));
  picker.addEventListener("change", () => {
    if (picker.files.length) open(picker.files[0]);
    picker.value = ""; // so that the same file can be chosen again
  });
  acceptDrops((file) => {
    onOpened();
    open(file);
  });
}

function acceptDrops(onFile) {
  const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let inside = 0; // enter and leave come for every element on the way
  const mark = (change) => {
    inside = Math.max(0, change === 0 ? 0 : inside + change);
    document.body.classList.toggle("dropping", inside > 0);
  };
  document.addEventListener("dragenter", (event) => carriesFile(event) && mark(1));
  document.addEventListener("dragleave", (event) => carriesFile(event) && mark(-1));
  document.addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    mark(0);
    const file = event.dataTransfer.files[0];
    if (file) onFile(file);
  });
}
