// One step, opened: what was proposed, what the target said, where it stopped, and what it took.

import { count, figure, h, visible } from "./dom.js";
import { OUTCOMES, inWords } from "./steps.js";
import { drawTree } from "./tree.js";

const COLUMNS = ["Node", "Token", "Follows", "Confidence", "Outcome"];
const HINT = "Hover a token, or reach it with the arrow keys, to see the step it came from.";

export function createInspector() {
  const title = h("h3", {}, "Draft tree");
  const words = h("p", { class: "words" });
  const canvas = h("div", {
    class: "tree-frame", tabindex: "0", role: "group", "aria-label": "Draft tree of the step",
  });
  const facts = h("p", { class: "facts soft" });
  const rows = h("tbody");
  const table = h("details", { class: "nodes" },
    h("summary", {}, "The tree as a table"),
    h("div", { class: "scroll" },
      h("table", {},
        h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name)))),
        rows)));
  const hint = h("p", { class: "soft hint" }, HINT);
  const body = h("div", { hidden: true }, words, canvas, key(), facts, table);
  let shown = null;

  function show(step, place, total) {
    if (shown === step) return;
    shown = step;
    hint.hidden = true;
    body.hidden = false;
    title.textContent = `Step ${place + 1} of ${total}`;
    words.textContent = inWords(step);
    canvas.replaceChildren(drawTree(step));
    canvas.scrollTo(0, 0);
    facts.textContent = factsOf(step);
    table.hidden = step.drafted === 0;
    fillTable(step);
  }

  function fillTable(step) {
    rows.replaceChildren(...step.nodes.map((node, place) => h("tr", {},
      h("td", {}, String(place)),
      h("td", { class: "code" }, visible(node.text)),
      h("td", {}, node.parent < 0 ? "" : String(node.parent)),
      h("td", {}, node.confidence === null ? "" : figure(node.confidence)),
      h("td", {}, OUTCOMES[node.outcome]))));
  }

  return {
    element: h("section", { class: "inspector", "aria-label": "The step" }, title, hint, body),
    show,
    clear() {
      shown = null;
      title.textContent = "Draft tree";
      hint.hidden = false;
      body.hidden = true;
    },
  };
}

function factsOf(step) {
  const milliseconds = (seconds) => `${figure(seconds * 1000, 1)} ms`;
  const parts = [];
  if (step.position !== null) parts.push(`position ${step.position}`);
  if (step.rule) parts.push(`rule ${step.rule}`);
  if (step.drafter) parts.push(`drafter ${step.drafter}`);
  parts.push(`${count(step.drafted, "draft")} → ${count(step.tokens.length, "token")}`);
  if (step.drafted && step.nodes.every((node) => node.confidence === null)) parts.push("no confidences told");
  if (step.seconds.all) {
    const { draft, target, verify } = step.seconds;
    parts.push(`draft ${milliseconds(draft)}, target ${milliseconds(target)}, verify ${milliseconds(verify)}`);
  }
  return parts.join(" · ");
}

function key() {
  const entry = (name, words) => h("li", {}, h("i", { class: `swatch ${name}`, "aria-hidden": "true" }), words);
  return h("ul", { class: "key" },
    entry("accepted", "accepted"), entry("refused", "refused"), entry("unreached", "never reached"),
    entry("corrected", "target, instead"), entry("bonus", "target, next"));
}
