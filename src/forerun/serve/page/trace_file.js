// Files of `forerun generate --trace`: one JSON line a step, each with the sequences that took part in it.

import { readStep } from "./steps.js";

const LARGEST = 200 * 1024 * 1024;
const ADVICE = "choose a file that forerun generate --trace wrote.";

/** {texts: [{name, steps}], warning}; throws an Error whose message is one sentence for the reader. */
export function readTrace(content, name) {
  if (content.length > LARGEST) throw new Error(`${name} is larger than 200 MB: trace a shorter run.`);
  if (content.includes("\u0000")) throw new Error(`${name} is not text: ${ADVICE}`);
  const lines = content.split("\n").map((line, place) => ({ line: line.trim(), number: place + 1 }));
  const filled = lines.filter(({ line }) => line !== "");
  if (filled.length === 0) throw new Error(`${name} is empty: the run that should have written it made no step.`);
  const found = new Map();
  let warning = null;
  for (const [order, { line, number }] of filled.entries()) {
    let record;
    try {
      record = JSON.parse(line);
    } catch {
      if (order === 0 || order < filled.length - 1) {
        throw new Error(`Line ${number} of ${name} is not JSON: ${ADVICE}`);
      }
      warning = `Line ${number}, the last of ${name}, is cut off: the ${order} lines before it are shown.`;
      break;
    }
    addRecord(found, record, number, name);
  }
  const texts = [...found.values()].filter(({ steps }) => steps.length > 0);
  if (texts.length === 0) throw new Error(`${name} has no step that wrote a token: trace a run to its end.`);
  return { texts, warning };
}

function addRecord(found, record, number, name) {
  const sequences = record?.sequences;
  if (!Array.isArray(sequences)) {
    throw new Error(`Line ${number} of ${name} is not a step of a trace: it has no list of sequences.`);
  }
  for (const raw of sequences) {
    const key = `${raw?.request ?? 0}/${raw?.index ?? 0}`;
    const text = found.get(key) ?? { name: nameOf(raw), steps: [], before: null };
    found.set(key, text);
    let step;
    try {
      if (raw === null || typeof raw !== "object") throw new Error("a step is not an object");
      step = readStep({ ...raw, seconds: record.seconds, step: record.step }, { before: text.before, rooted: true });
    } catch (error) {
      throw new Error(`Line ${number} of ${name} is damaged: ${error.message}.`);
    }
    if (step.tokens.length > 0) {
      text.steps.push(step);
      text.before = step.tokens.at(-1);
    }
  }
}

function nameOf(raw) {
  const request = `Request ${(raw?.request ?? 0) + 1}`;
  return raw?.index ? `${request}, text ${raw.index + 1}` : request;
}

/** Steps of a stream as a trace file, root and all, with the texts that such a file otherwise lacks. */
export function asTrace(rawSteps) {
  let before = { id: -1, text: "…" };
  const lines = rawSteps.map(({ step, seconds, rows, cache_used, ...told }) => {
    const sequence = {
      request: 0,
      ...told,
      tokens: [before.id, ...told.tokens],
      texts: [before.text, ...told.texts],
      parents: [-1, ...told.parents.map((parent) => parent + 1)],
      confidences: [null, ...(told.confidences ?? told.tokens.map(() => null))],
      accepted: told.accepted.map((place) => place + 1),
    };
    before = { id: told.committed.at(-1) ?? before.id, text: told.committed_texts.at(-1) ?? before.text };
    return JSON.stringify({ step, rows, cache_used, seconds, sequences: [sequence] });
  });
  return lines.map((line) => `${line}\n`).join("");
}
