// The draft tree of one step as a picture. What was written runs along the top as a straight line; drafts that were
// refused hang below the node where the target said something else.

import { OUTCOMES, inWords, targetToken } from "./steps.js";
import { figure, svg, visible } from "./dom.js";

const ROW = 34;
const BOX = 24;
const GAP = 26;
const TOP = 22;
const SIDE = 3;
const LETTER = 7.3;
const LONGEST = 16;
const CAPTION = 92;

/** An SVG element that names itself in words for those who cannot see it. */
export function drawTree(step) {
  const items = arrange(step);
  const lefts = columns(items);
  const right = (item) => lefts[item.depth] + Math.max(item.width, item.target ? CAPTION : 0);
  const width = Math.max(...items.map(right)) + SIDE;
  const height = TOP + (Math.max(...items.map((item) => item.row)) + 1) * ROW;
  const picture = svg("svg", {
    class: "tree", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": inWords(step),
  });
  for (const item of items) if (item.from) picture.append(edge(item, lefts));
  for (const item of items) picture.append(box(item, lefts));
  return picture;
}

function arrange(step) {
  const items = step.nodes.map((node) => ({
    depth: node.depth,
    outcome: node.outcome,
    label: shortened(visible(node.text)),
    title: `${visible(node.text)} — ${OUTCOMES[node.outcome]}${
      node.confidence === null ? "" : `, drafted with confidence ${figure(node.confidence)}`}`,
    confidence: node.confidence,
    from: null,
    children: [],
  }));
  step.nodes.forEach((node, place) => {
    if (node.parent < 0) return;
    items[place].from = items[node.parent];
    items[node.parent].children.push(items[place]);
  });
  const own = targetToken(step);
  if (own !== null) {
    const from = items[own.after];
    const label = shortened(visible(own.text));
    const title = `${visible(own.text)} — the target's own token (${own.kind})`;
    const depth = from.depth + 1;
    const said = { depth, outcome: own.kind, label, title, confidence: null, from, children: [], target: true };
    from.children.push(said);
    items.push(said);
  }
  const first = (item) => (item.target || item.outcome === "accepted" || item.outcome === "cut" ? 0 : 1);
  let rows = 0;
  const pending = [items[0]];
  while (pending.length) { // depth first, without recursion: a chain may be long
    const item = pending.pop();
    item.children.sort((one, other) => first(one) - first(other)); // stable: drafts keep their order
    if (item.from === null) item.row = 0;
    else item.row = item.from.children[0] === item ? item.from.row : (rows += 1);
    pending.push(...item.children.toReversed());
  }
  for (const item of items) item.width = widthOf(item);
  return items;
}

function widthOf(item) {
  const letters = item.label.length + (item.confidence === null ? 0 : 4.2);
  return Math.max(30, Math.round(letters * LETTER + 16));
}

function shortened(text) {
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
}

function columns(items) {
  const widest = [];
  for (const item of items) widest[item.depth] = Math.max(widest[item.depth] ?? 0, item.width);
  let left = SIDE;
  return widest.map((width) => {
    const here = left;
    left += width + GAP;
    return here;
  });
}

function middle(item) {
  return TOP + item.row * ROW + BOX / 2;
}

function edge(item, lefts) {
  const [x1, y1] = [lefts[item.from.depth] + item.from.width, middle(item.from)];
  const [x2, y2] = [lefts[item.depth], middle(item)];
  const turn = Math.max(lefts[item.depth] - GAP / 2, x1);
  const down = `H${turn - 6}Q${turn} ${y1} ${turn} ${y1 + 8}V${y2 - 8}Q${turn} ${y2} ${turn + 8} ${y2}`;
  const path = `M${x1} ${y1}${y1 === y2 ? "" : down}H${x2}`;
  return svg("path", { class: `edge ${item.outcome}`, d: path });
}

function box(item, lefts) {
  const [left, top] = [lefts[item.depth], TOP + item.row * ROW];
  const group = svg("g", { class: `node ${item.outcome}`, transform: `translate(${left} ${top})` });
  group.append(svg("title", {}, item.title));
  group.append(svg("rect", { class: "box", width: item.width, height: BOX, rx: item.target ? BOX / 2 : 4 }));
  group.append(svg("text", { class: "label", x: 8, y: 16 }, item.label));
  if (item.outcome === "refused") {
    const end = 8 + item.label.length * LETTER;
    group.append(svg("line", { class: "strike", x1: 7, x2: end + 1, y1: 12.5, y2: 12.5 }));
  }
  if (item.confidence !== null) {
    const share = Math.min(Math.max(item.confidence, 0), 1);
    group.append(svg("text", { class: "confidence", x: item.width - 6, y: 16, "text-anchor": "end" }, figure(share)));
    group.append(svg("rect", { class: "bar", x: 4, y: BOX - 3.5, width: (item.width - 8) * share, height: 2, rx: 1 }));
  }
  if (item.target) {
    const says = item.outcome === "corrected" ? "target: instead" : "target: next";
    group.append(svg("text", { class: "caption", x: 2, y: -6 }, says));
  }
  return group;
}
