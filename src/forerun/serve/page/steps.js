// What one step did, in the form that the views read, from a line of a trace or a chunk of a stream.
//
// Node 0 is the root, the last token that was there already. Its descendants are the drafts. `accepted` are places of
// nodes; a step commits their tokens and one token of the target: `corrected` where its drafts were all refused,
// `bonus` where there were none left to refuse. Traces name the root first; streams leave it out and say -1 for it.

export const OUTCOMES = {
  root: "the token before",
  accepted: "accepted",
  refused: "refused: the target said something else here",
  unreached: "never reached: a token before it was refused",
  cut: "accepted, but the text had ended",
};

export const KINDS = {
  accepted: "accepted",
  corrected: "corrected",
  bonus: "bonus",
  undrafted: "not drafted",
};

/** `before` is the last token of the step before. Throws an Error that says in a few words what is wrong. */
export function readStep(raw, { before = null, rooted }) {
  const drafted = wholes(raw, "tokens");
  const parents = wholes(raw, "parents");
  const places = wholes(raw, "accepted");
  const committed = wholes(raw, "committed");
  const kinds = list(raw, "kinds");
  if (parents.length !== drafted.length) throw new Error("tokens and parents differ in number");
  if (kinds.length !== committed.length) throw new Error("committed tokens and kinds differ in number");
  if (kinds.some((kind) => !["accepted", "corrected", "bonus"].includes(kind))) throw new Error("a kind is unknown");
  const shift = rooted && drafted.length > 0 ? 0 : 1;
  const nodes = nodesOf(raw, drafted, parents, shift, before);
  const path = places.map((place) => place + shift);
  markPath(nodes, path, committed, kinds);
  return {
    step: Number.isInteger(raw.step) ? raw.step : 0,
    position: Number.isInteger(raw.position) ? raw.position : null,
    rule: typeof raw.rule === "string" ? raw.rule : "",
    drafter: typeof raw.drafter === "string" ? raw.drafter : "",
    finish: typeof raw.finish_reason === "string" ? raw.finish_reason : null,
    seconds: secondsOf(raw.seconds),
    nodes,
    depth: nodes.reduce((most, node) => Math.max(most, node.depth), 0),
    drafted: nodes.length - 1,
    tokens: tokensOf(raw, nodes, path, committed, kinds),
  };
}

function list(raw, name) {
  const value = raw[name] ?? [];
  if (!Array.isArray(value)) throw new Error(`${name} is not a list`);
  return value;
}

function wholes(raw, name) {
  const values = list(raw, name);
  if (!values.every(Number.isInteger)) throw new Error(`${name} holds something that is no whole number`);
  return values;
}

function nodesOf(raw, drafted, parents, shift, before) {
  const texts = list(raw, "texts");
  const confidences = list(raw, "confidences");
  const nodes = shift ? [node(before?.id ?? null, before?.text ?? null, -1, 0, null)] : [];
  drafted.forEach((id, place) => {
    const parent = parents[place] + shift;
    const isRoot = place === 0 && shift === 0;
    if (isRoot ? parent !== -1 : parent < 0 || parent >= nodes.length) {
      const late = `the parent of node ${place} does not come before it`;
      throw new Error(isRoot ? "the first node is not the root" : late);
    }
    const depth = parent < 0 ? 0 : nodes[parent].depth + 1;
    const text = typeof texts[place] === "string" ? texts[place] : null;
    const confidence = Number.isFinite(confidences[place]) ? confidences[place] : null;
    nodes.push(node(id, text, parent, depth, depth === 0 ? null : confidence));
  });
  nodes[0].outcome = "root";
  return nodes;
}

function node(id, text, parent, depth, confidence) {
  const unnamed = id === null || id < 0 ? "…" : `#${id}`;
  return { id, text: text ?? unnamed, parent, depth, confidence, outcome: "unreached" };
}

function markPath(nodes, path, committed, kinds) {
  let at = 0;
  path.forEach((place, order) => {
    if (place < 1 || place >= nodes.length) throw new Error(`node ${place} is accepted but not in the tree`);
    if (nodes[place].parent !== at) throw new Error(`node ${place} is accepted but does not follow the one before it`);
    nodes[place].outcome = order < committed.length ? "accepted" : "cut";
    at = place;
  });
  const ended = kinds.length > 0 && kinds.at(-1) === "accepted"; // cut there: the target's own token was not taken
  const visited = new Set(ended ? [0, ...path.slice(0, -1)] : [0, ...path]);
  if (committed.length === 0) return;
  for (const candidate of nodes.slice(1)) {
    if (candidate.outcome === "unreached" && visited.has(candidate.parent)) candidate.outcome = "refused";
  }
}

function tokensOf(raw, nodes, path, committed, kinds) {
  const texts = list(raw, "committed_texts");
  return committed.map((id, order) => {
    const place = kinds[order] === "accepted" ? path[order] : null;
    const kind = kinds[order] === "bonus" && nodes.length === 1 ? "undrafted" : kinds[order];
    const known = place === null ? undefined : nodes[place];
    const text = typeof texts[order] === "string" ? texts[order] : (known?.text ?? `#${id}`);
    const after = order === 0 ? 0 : (path[order - 1] ?? 0);
    return { id, text, named: typeof texts[order] === "string", part: text === "", kind, node: place ?? null, after };
  });
}

function secondsOf(seconds) {
  const part = (name) => (Number.isFinite(seconds?.[name]) ? seconds[name] : 0);
  const parts = { draft: part("draft"), target: part("target"), verify: part("verify"), rest: part("rest") };
  return { ...parts, all: parts.draft + parts.target + parts.verify + parts.rest };
}

/** The target's own token of a step, if it was taken. */
export function targetToken(step) {
  const last = step.tokens.at(-1);
  return last !== undefined && last.kind !== "accepted" ? last : null;
}

/** A step in one or two sentences: the tree for those who hear the page. */
export function inWords(step) {
  const accepted = step.tokens.filter((token) => token.kind === "accepted");
  const own = targetToken(step);
  const say = (token) => (token.named ? `“${token.text.replaceAll("\n", "↵")}”` : token.text);
  if (step.tokens.length === 0) return "Part of the prompt was read; nothing was written yet.";
  if (step.drafted === 0) return `Nothing was drafted; the target wrote ${say(own)}.`;
  const shape = step.depth === step.drafted ? "in a row" : `in a tree ${step.depth} deep`;
  const guesses = `${step.drafted} ${step.drafted === 1 ? "token was" : "tokens were"} drafted ${shape}. `;
  const taken = accepted.length ? `The target accepted ${accepted.map(say).join(", ")}` : "The target accepted none";
  if (own === null) return `${guesses}${taken}, and the text ended.`;
  const verb = own.kind === "corrected" ? "and corrected the draft with" : "and added one of its own,";
  return `${guesses}${taken} ${verb} ${say(own)}.`;
}
