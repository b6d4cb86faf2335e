"""Suffix decoding: what followed the end of the text wherever it stood before, in this text or in earlier outputs.

Like prompt lookup, with three differences. Outputs of requests that are over are remembered, so what a model says again
and again is drafted for the next one. All places count and not only the last, so a tree is drafted, its nodes taken by
their chance. And it knows what it does not know: nodes below `min_confidence` are left out, so where nothing is known
little is drafted. `suffix_tree.py` has the method.

    drafter.save("outputs.json")   # and later, for the same model: --drafter-option path=outputs.json
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.core.drawing import Drawing
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.drafters.confidence import logs_of
from forerun.drafters.drafter import Budget, Drafter, Observation
from forerun.drafters.find import Setup
from forerun.drafters.kinds import CHEAP_NODES
from forerun.drafters.none import roots_only
from forerun.drafters.suffix_tree import EARLIER, OWN, Guess, Limits, Store, Trust, grow

LEAD = 8
"""So many tokens of the prompt are remembered before an output: how answers begin is worth knowing, too."""
FORMAT = "forerun suffix 1"


@dataclass(frozen=True)
class Options:
    tokens: int = 0
    """How many tokens are drafted, at most; 0 for as many as this device checks at little more than the cost of one."""
    max_match: int = 24
    """The longest suffix that is looked up."""
    min_confidence: float = 0.02
    """A token is drafted if the chance that it is right, with all tokens before it, is at least this. One more row of a
    pass costs about a hundredth of it, and a token saves a whole pass."""
    width: int = 8
    """How many tokens are drafted for one position behind the same text; 1 drafts a chain."""
    memory: int = 50_000
    """How many tokens of earlier outputs are remembered; the oldest outputs go first. 0 looks at the request alone."""
    path: str = ""
    """A file of earlier outputs to start with, as `save` writes it; one that does not exist yet is no mistake."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tokens", 0, 64),
            ("max_match", 1, 64),
            ("width", 1, 32),
            ("memory", 0, 10_000_000),
        ):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"the suffix option {name} is {value!r}: give a whole number from {least} to {most}")
        chance: object = self.min_confidence
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 < chance <= 1:
            raise ValueError(
                f"the suffix option min_confidence is {chance!r}: give a number above 0, 1 at most, such as 0.1"
            )


def make(options: Options, setup: Setup) -> Drafter:
    drafter = Suffix(replace(options, tokens=options.tokens or setup.nodes), setup.target.vocab_size)
    if options.path and Path(options.path).exists():
        drafter.load(options.path)
    return drafter


class Suffix:
    drawing = Drawing.FIXED
    layers: tuple[int, ...] = ()
    top: int = 0

    def __init__(self, options: Options, vocabulary: int) -> None:
        self.options = options
        self.vocabulary = vocabulary
        self.branches = options.width > 1
        self._earlier = Store(Trust(EARLIER), grows=False)
        self._trust = Trust(OWN)  # in what a request repeats of its own text; the same for all of them
        self._own: dict[int, Store] = {}
        self._over: deque[list[int]] = deque()  # outputs to be remembered, which are read when something is drafted
        self._unread = 0  # their tokens
        self._reading = 0.0
        self._guesses: dict[int, Guess] = {}

    def draft(self, sequences: Many[Sequence], budgets: Many[Budget]) -> DraftTree:
        before = time.perf_counter()
        self._read_outputs()
        for sequence, budget in zip(sequences, budgets, strict=True):
            if min(budget.nodes, budget.depth) > 0:
                self._read(sequence)
        self._reading += time.perf_counter() - before
        guesses = [self._guess(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        for sequence, guess in zip(sequences, guesses, strict=True):
            self._guesses[sequence.id] = guess
        if all(len(guess.tokens) == 1 for guess in guesses):
            return roots_only(sequences)
        trees = [(guess.tokens, guess.parents) for guess in guesses]
        values = logs_of([guess.values for guess in guesses])
        return DraftTree.of_lists(trees, [sequence.position for sequence in sequences], log_values=values)

    def observe(self, observations: Many[Observation]) -> None:
        """Committed text is read from the sequences themselves; here is learnt which guesses were good."""
        for seen in observations:
            guess = self._guesses.pop(seen.sequence.id, None)
            if guess is not None:
                guess.learn(seen.tokens)

    def forget(self, sequence: Sequence) -> None:
        """The output of a request that is over is remembered; one that only steps back will be over later."""
        self._own.pop(sequence.id, None)
        self._guesses.pop(sequence.id, None)
        if sequence.finish_reason is not None:
            self._remember(sequence.prompt[-LEAD:] + sequence.output)

    def late(self) -> float:
        seconds, self._reading = self._reading, 0.0
        return seconds

    @property
    def earlier(self) -> Store:
        """The outputs of requests that are over."""
        self._read_outputs()
        return self._earlier

    def save(self, path: str | Path) -> None:
        """Write the earlier outputs to a file: all of it, or nothing."""
        target = Path(path)
        content = {"format": FORMAT, "vocabulary": self.vocabulary, "outputs": [*filter(None, self.earlier.texts())]}
        part = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            part.write_text(json.dumps(content, separators=(",", ":")), "utf-8")
            os.replace(part, target)
        except OSError as error:
            raise ValueError(f"cannot write {target}, {error.strerror}: name a file in a folder to write to") from None
        finally:
            part.unlink(missing_ok=True)

    def load(self, path: str | Path) -> None:
        """Remember the outputs of a file too."""
        for output in _outputs(Path(path), self.vocabulary):
            self._remember(output)
        self._read_outputs()

    def _guess(self, sequence: Sequence, budget: Budget) -> Guess:
        text, options = sequence.tokens, self.options
        limits = Limits(
            min(options.tokens or CHEAP_NODES, budget.nodes), budget.depth, options.width, options.min_confidence
        )
        if limits.nodes < 1 or limits.depth < 1:
            return Guess([text[-1]])
        places = self._own[sequence.id].places(text, options.max_match) + self.earlier.places(text, options.max_match)
        return grow(text[-1], places, limits)

    def _read(self, sequence: Sequence) -> None:
        """All that a text has said by now."""
        own = self._own.get(sequence.id)
        if own is None:
            own = self._own[sequence.id] = Store(self._trust, grows=True)
        own.extend(sequence.tokens[len(own.tokens) :])

    def _remember(self, output: list[int]) -> None:
        """Where nothing is drafted this should cost nothing. Of what would be forgotten again nothing need wait."""
        if self.options.memory:
            self._over.append(output[-self.options.memory :])
            self._unread += len(self._over[-1])
            while self._unread - len(self._over[0]) >= self.options.memory:
                self._unread -= len(self._over.popleft())

    def _read_outputs(self) -> None:
        while self._over:
            self._earlier.begin()
            self._earlier.extend(self._over.popleft())
            while len(self._earlier) > self.options.memory:
                self._earlier.drop_first()
        self._unread = 0


def _outputs(path: Path, vocabulary: int) -> list[list[int]]:
    """Of a file that `save` wrote for a model with this vocabulary."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}, {error.strerror}: name a file that the suffix drafter saved") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or was not saved by the suffix drafter: remove it, or name another path")
    if content.get("vocabulary") != vocabulary:
        raise ValueError(
            f"{path} was saved for a vocabulary of {content.get('vocabulary')} tokens and this model has {vocabulary}: "
            f"name another path for this model"
        )
    outputs = content.get("outputs")
    if not isinstance(outputs, list) or not all(_sound(output, vocabulary) for output in outputs):
        raise ValueError(f"{path} is damaged, it holds no lists of tokens: remove it, or name another path")
    return outputs


def _sound(output: object, vocabulary: int) -> bool:
    """Whether it is a list of tokens."""
    return isinstance(output, list) and all(type(token) is int and 0 <= token < vocabulary for token in output)
