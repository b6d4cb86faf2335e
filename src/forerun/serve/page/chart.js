// Line charts with a few marks: enough for curves of one variable.

import { figure, svg } from "./dom.js";

const EDGE = { left: 46, right: 14, top: 14, bottom: 42 };

/** In units of about a pixel: narrow windows get a smaller plane, not smaller letters. */
export function planeWidth() {
  return window.innerWidth < 560 ? 330 : 560;
}

/** {element, x, y, width}: an SVG with axes and the maps from values to places in it. */
export function chart({ label, across, up, xs, ys, xTicks, format = (value) => figure(value, 1) }) {
  const width = planeWidth();
  const height = Math.round(width / 3 + 114);
  const x = scale(xs, EDGE.left, width - EDGE.right);
  const y = scale(ys, height - EDGE.bottom, EDGE.top);
  const element = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(ys)) {
    element.append(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
    const place = { x: EDGE.left - 8, y: y(value) + 4, "text-anchor": "end" };
    element.append(svg("text", { class: "tick", ...place }, format(value)));
  }
  for (const value of xTicks) {
    const place = { x: x(value), y: height - EDGE.bottom + 18, "text-anchor": "middle" };
    element.append(svg("text", { class: "tick", ...place }, String(value)));
  }
  element.append(svg("text", { class: "axis", x: width - EDGE.right, y: height - 6, "text-anchor": "end" }, across));
  element.append(svg("text", { class: "axis", x: EDGE.left + 6, y: EDGE.top + 6 }, up));
  return { element, x, y, width };
}

function scale([low, high], from, to) {
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

/** Round values, four to seven of them. */
function ticks([low, high]) {
  const rough = (high - low) / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-9; at += 1) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}

export function line(plane, points, name) {
  const places = points.map(([a, b]) => `${plane.x(a).toFixed(2)} ${plane.y(b).toFixed(2)}`);
  plane.element.append(svg("path", { class: `curve ${name}`, d: `M${places.join("L")}` }));
}

export function level(plane, value, name) {
  const { y, width } = plane;
  const ends = { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) };
  plane.element.append(svg("line", { class: `level ${name}`, ...ends }));
}

/** A mark with words beside it, on the side where there is room. */
export function mark(plane, [a, b], name, words, { shape = "circle", below = false } = {}) {
  const [x, y] = [plane.x(a), plane.y(b)];
  const picture = shape === "circle"
    ? svg("circle", { class: `mark ${name}`, cx: x, cy: y, r: 5.5 })
    : svg("path", { class: `mark ${name}`, d: `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z` });
  plane.element.append(picture);
  const late = x > plane.width * 0.6;
  const place = { x: x + (late ? -10 : 10), y: y + (below ? 24 : -11), "text-anchor": late ? "end" : "start" };
  plane.element.append(svg("text", { class: `words ${name}`, ...place }, words));
}

/** Words at the right end of a curve. */
export function note(plane, [a, b], name, words, below) {
  const place = { x: plane.x(a), y: plane.y(b) + (below ? 20 : -10), "text-anchor": "end" };
  plane.element.append(svg("text", { class: `words ${name}`, ...place }, words));
}

export function dots(plane, points, name) {
  for (const [a, b] of points) {
    plane.element.append(svg("circle", { class: `dot ${name}`, cx: plane.x(a), cy: plane.y(b), r: 2.6 }));
  }
}
