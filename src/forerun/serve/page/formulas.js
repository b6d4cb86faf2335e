// The closed forms of speculative decoding, as in src/forerun/theory: a test holds both to the same figures.
//
// A step drafts γ tokens, each accepted with probability α, and commits the accepted ones and one of the target.
// c is what one draft step costs, counted in passes of the target.

export const LONGEST = 32;

/** E = (1 − α^(γ+1))/(1 − α); γ + 1 at α = 1. */
export function expectedTokens(alpha, gamma) {
  if (alpha === 1) return gamma + 1;
  if (alpha === 0) return 1;
  // Near α = 1 the plain difference would lose every digit.
  return -Math.expm1((gamma + 1) * Math.log(alpha)) / (1 - alpha);
}

/** E/(1 + γc) against plain decoding, which is γ = 0 and exactly 1. */
export function speedup(alpha, gamma, cost) {
  return gamma === 0 ? 1 : expectedTokens(alpha, gamma) / (1 + gamma * cost);
}

/** The γ with the largest speedup; 0 says: do not speculate. Ties go to the smaller one. */
export function bestGamma(alpha, cost, longest = LONGEST) {
  let best = 0;
  let most = 1;
  for (let gamma = 1; gamma <= longest; gamma += 1) {
    const candidate = speedup(alpha, gamma, cost);
    if (candidate > most * (1 + 1e-12)) [best, most] = [gamma, candidate];
  }
  return best;
}

/** P(k tokens) for k = 0 … γ + 1; a step never commits none, so the first is 0. */
export function distribution(alpha, gamma) {
  const chances = [0];
  for (let tokens = 1; tokens <= gamma; tokens += 1) chances.push(alpha ** (tokens - 1) * (1 - alpha));
  chances.push(alpha ** gamma);
  return chances;
}

/** Uniform numbers in [0, 1) from a seed (mulberry32): a Monte-Carlo that can be watched again. */
export function uniforms(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** One step with coins instead of models: how many drafts stand before the first failure. */
export function tossedDrafts(alpha, gamma, uniform) {
  let accepted = 0;
  while (accepted < gamma && uniform() < alpha) accepted += 1;
  return accepted;
}
