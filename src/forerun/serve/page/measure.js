// What a text's steps add up to.

export function measure(steps) {
  let tokens = 0, accepted = 0, drafted = 0, refusals = 0, drafting = 0, depth = 0, written = 0;
  let draftSeconds = 0, targetSeconds = 0, seconds = 0;
  for (const step of steps) {
    const taken = step.tokens.filter((token) => token.kind === "accepted").length;
    tokens += step.tokens.length;
    drafted += step.drafted;
    accepted += taken;
    seconds += step.seconds.all;
    if (step.drafted === 0) continue;
    drafting += 1;
    depth += step.depth;
    written += step.tokens.length;
    refusals += step.tokens.at(-1)?.kind === "corrected" ? 1 : 0;
    draftSeconds += step.seconds.draft;
    targetSeconds += step.seconds.target;
  }
  const tested = accepted + refusals;
  return {
    tokens,
    passes: steps.length,
    drafted,
    accepted,
    seconds,
    tokensPerPass: steps.length ? tokens / steps.length : null,
    // The estimate that fits coins with one α best: successes over tosses, where each step ends with its first failure.
    alpha: tested ? accepted / tested : null,
    tested,
    // Of the steps that had a draft: how deep, what they wrote, what a level cost in passes of the target.
    depth: drafting ? depth / drafting : null,
    tokensPerDraftedStep: drafting ? written / drafting : null,
    cost: depth && targetSeconds ? draftSeconds / depth / (targetSeconds / drafting) : null,
  };
}
