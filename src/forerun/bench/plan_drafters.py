"""Drafters, measured on prompts: what their drafts of every size are worth there, what they take, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from forerun.bench.cases import shown
from forerun.bench.contest import in_words
from forerun.bench.memory import Ledger
from forerun.bench.plan_model import Candidate, drafting_seconds, mean_rows, tokens_per_pass, walk
from forerun.bench.plan_probe import WHOLE, Probe
from forerun.bench.plan_profile import engine_of
from forerun.bench.plan_sizes import options_for, sizes_of, variants
from forerun.core.params import SamplingParams
from forerun.core.shortage import ran_out_of_memory, shortage
from forerun.drafters.drafter import SharesCache
from forerun.drafters.find import Setup, make_drafter, names
from forerun.drafters.trained_folder import shipped_head
from forerun.engine.loaded import LoadedModel
from forerun.models.identity import weights_identity
from forerun.models.transformer import Transformer

WITHOUT_TRAINING = ("ngram", "suffix", "recycling", "combine")
WATCHED = 8
"""Texts at once where acceptance is measured: it is the same for any number, and so many are quick."""
TIMED = 4
"""Steps at least in which drafts of a size are timed."""
Tell = Callable[[str], None]


def default_drafters(model: LoadedModel) -> list[str]:
    """Those that need no training, and those that come with Forerun for this target."""
    target = model.target
    folder = Path(str(files("forerun"))) / "trained"
    if not folder.is_dir() or not isinstance(target, Transformer):
        return list(WITHOUT_TRAINING)
    identity = weights_identity(target)
    methods = {name: "draft" if name == "draft_model" else name for name in names()}
    trained = [name for name, method in methods.items() if shipped_head(method, identity) is not None]
    return [*WITHOUT_TRAINING, *trained]


@dataclass
class Measured:
    """A drafter with one kind of tree, or why it could not be measured."""

    drafter: str
    given: Mapping[str, str]
    """Its options, as far as they were said."""
    kind: str = "chain"
    candidates: list[Candidate] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "options": {key: shown(value) for key, value in self.given.items()},
            "kind": self.kind,
            "peak_bytes": self.peak_bytes,
            "error": self.error,
            "sizes": [
                {
                    "size": each.size,
                    "tokens_per_pass": tokens_per_pass(each.walks),
                    "rows": 1 + mean_rows(each.walks),
                    "draft_ms": {str(batch): 1000 * drafting_seconds(each, batch) for batch in each.drafting},
                }
                for each in self.candidates
            ],
        }


@dataclass(frozen=True)
class Watch:
    """What all drafters are measured on alike."""

    model: LoadedModel
    prompts: Sequence[list[int]]
    params: SamplingParams
    batches: Sequence[int]

    def measure(self, name: str, options: Mapping[str, str], ledger: Ledger, tell: Tell) -> list[Measured]:
        """With each kind of tree that it has. A drafter that fails is told with its error."""
        found = []
        for given in variants(name, options):
            own = Measured(shown(name), given)
            try:
                with ledger.at_work((name, *given.items())):
                    self._measure(name, given, own, tell)
                    gc.collect()
            except Exception as error:  # of whatever kind: it belongs to this drafter
                own.error = in_words(error)
            own.peak_bytes = ledger.peak((name, *given.items()))
            found.append(own)
        return found

    def _measure(self, name: str, given: Mapping[str, str], own: Measured, tell: Tell) -> None:
        probe = self._run(name, given, min(WATCHED, len(self.prompts)), tell)
        own.kind = "tree" if probe.branches else "chain"
        if not probe.natural:
            return
        tried = [*(size for size in probe.sizes if size < probe.natural), WHOLE]
        drafting = {}
        for batch in self.batches:
            try:
                drafting[batch] = _drafting(self._run(name, given, batch, tell, tried), tried)
            except (MemoryError, RuntimeError) as error:
                if not ran_out_of_memory(error):
                    raise
                own.error = f"{batch} at once: {shortage(error)}"  # with fewer it is planned
        for size in tried:
            said = {} if size == WHOLE else options_for(name, probe.inner, size)
            if said is None:
                continue
            walks = [walk(len(prompt), probe.texts.get(text, []), size) for text, prompt in enumerate(self.prompts)]
            times = {batch: by_size[size] for batch, by_size in drafting.items() if by_size[size]}
            most = probe.natural if size == WHOLE else size
            own.candidates.append(Candidate(name, most, own.kind, {**given, **said}, walks, times))

    def _run(
        self, name: str, given: Mapping[str, str], batch: int, tell: Tell, timed: Sequence[int] | None = None
    ) -> Probe:
        """Over all prompts; or, where sizes are given, a few steps of `batch` texts to time them in."""
        prompts, params = self.prompts, self.params
        if timed is not None:
            prompts = [self.prompts[place % len(self.prompts)] for place in range(batch)]
            params = replace(self.params, max_tokens=2 * TIMED * len(timed) + 2, ignore_eos=True)
        target, load = self.model.target, self.model.load_beside
        slots = batch * (max(map(len, prompts)) + params.max_tokens + 2 * WHOLE)
        setup = Setup(target, slots, load, lambda: self.model.tokenizer.fingerprint, self.model.folder)
        drafter = make_drafter(name, setup, given)
        sizes = sizes_of(name, drafter) if timed is None else timed
        probe = Probe(drafter, sizes, batch, target.device, timing=timed is not None)
        engine = engine_of(target, probe, prompts, params, batch)
        if isinstance(drafter, SharesCache):
            drafter.share(engine.cache)
        done = 0
        while engine.has_work:
            done += sum(update.finish_reason is not None for update in engine.step())
            tell(f"{batch} at once, {done} of {len(prompts)} texts")
        return probe


def _drafting(probe: Probe, sizes: Sequence[int]) -> dict[int, list[float]]:
    """By size, seconds of single steps: drafting and learning."""
    once = fmean(probe.observing or [0.0])
    return {size: [once + seconds for seconds in probe.seconds.get(size, [])] for size in sizes}
