"""Small grammars for the enumeration, and the toy engine with one: its trees go through the engine's own pruning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core.grammar import Grammar
from forerun.core.sequence import Sequence
from forerun.core.tree import DraftTree
from forerun.engine import grammar_trees
from forerun.engine.grammar import Grammar as LibraryGrammar
from forerun.engine.grammar_trees import Room
from forerun.engine.grammar_walk import Walk, begin_walk
from forerun.verify.plain import PlainTree, Row

from .toy import Draft, MergedToyEngine, State, Step, Text, ToyEngine


@dataclass(frozen=True)
class Automaton:
    """States are whole numbers, and 0 is the first."""

    follows: Mapping[int, Mapping[int, int]]
    """For each state the tokens that may come, and where they lead."""
    whole: frozenset[int] = frozenset()
    """States in which the text may end."""
    guesses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """What is called forced in a state, besides the only token that may come: as with bytes that are forced and may
    be spelled in several ways. The law must not depend on it."""

    def start(self) -> AutomatonState:
        return AutomatonState(self)


class AutomatonState:
    def __init__(self, automaton: Automaton) -> None:
        self.automaton, self.path = automaton, [0]

    @property
    def _next(self) -> Mapping[int, int]:
        return self.automaton.follows.get(self.path[-1], {})

    def take(self, token: int) -> bool:
        if token not in self._next:
            return False
        self.path.append(self._next[token])
        return True

    def back(self, count: int) -> None:
        del self.path[len(self.path) - count :]

    def allowed(self, width: int) -> Tensor:
        return torch.tensor([token in self._next for token in range(width)])

    def forced(self) -> list[int]:
        here, tokens = self.path[-1], list(self.automaton.guesses.get(self.path[-1], ()))
        while not tokens or (not self.automaton.guesses.get(here) and len(tokens) < 3):
            only = self.automaton.follows.get(here, {})
            if len(only) != 1 or here in self.automaton.whole:
                break
            tokens.append(next(iter(only)))
            here = only[tokens[-1]]
        return tokens

    @property
    def may_end(self) -> bool:
        return self.path[-1] in self.automaton.whole

    @property
    def must_end(self) -> bool:
        return not self._next


GRAMMARS: dict[str, Grammar] = {
    # 0, then 1 or 2; then again, or the end (token 3 ends a text where it may)
    "pairs": Automaton({0: {0: 1}, 1: {1: 2, 2: 2}, 2: {0: 1}}, whole=frozenset({2})),
    # 1 2 forced behind 0; 2 alone otherwise, and then the text must end
    "runs": Automaton({0: {0: 1, 2: 4}, 1: {1: 2}, 2: {2: 3}, 3: {0: 1, 1: 4}, 4: {}}, whole=frozenset({4})),
    # called forced although other tokens may come
    "spelled": Automaton({0: {0: 0, 1: 1}, 1: {0: 0, 1: 1, 2: 1}}, guesses={0: (1, 2), 1: (0,)}),
}
ENDING = 3


class Letters:
    """A tokenizer of four tokens, as llguidance wants one."""

    eos_token_id, bos_token_id = ENDING, None
    tokens = (b"a", b"b", b"ab", b"<end>")
    special_token_ids = (ENDING,)

    def __call__(self, text: bytes) -> list[int]:
        pieces = text.decode().replace("ab", "2").replace("a", "0").replace("b", "1")
        return [int(piece) for piece in pieces]


def by_llguidance(pattern: str) -> Grammar:
    """The engine's own grammars, over those tokens."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    table = LLTokenizer(TokenizerWrapper(Letters()))
    matcher = LLMatcher(table, LLMatcher.grammar_from_regex(pattern))
    assert not matcher.is_error(), matcher.get_error()
    return LibraryGrammar(matcher, table)


GRAMMARS["letters"] = by_llguidance("(ab|ba*b)*aab?")


def walked(grammar: Grammar, output: Text, vocabulary: int) -> Walk:
    walk = Walk(grammar, frozenset({ENDING}), vocabulary)
    for token in output:
        assert walk.commit(token)
    return walk


class WithGrammar(ToyEngine):
    """The laws of every node with the mask of its own state, and trees as the engine prunes them."""

    grammar: Grammar
    room: Room
    _text: Text = ()

    def _output(self, text: Text) -> Text:
        return text[len(self.prompt) :]

    def target_law(self, seen: Text, path: Text) -> Row:
        """A node that needs no row in the pass has none."""
        key = ("target", seen, path)
        if key not in self._laws:
            self._laws[key] = self._law_at_node(seen, path)
        return self._laws[key]

    def _law_at_node(self, seen: Text, path: Text) -> Row:
        walk = walked(self.grammar, self._output(seen), self.pair.vocabulary)
        entered = 0
        while entered < len(path) and walk.enter(path[entered]):
            entered += 1
        for _ in range(entered):
            walk.leave()
        if entered < len(path) and not walk.over:
            return np.zeros(self.pair.vocabulary)
        return self._masked(seen, path, walk.mask(path))

    def _masked(self, seen: Text, path: Text, allowed: Tensor) -> Row:
        self.mask = tuple(allowed.tolist())
        row = self._compute_law("target", seen, path)
        self.mask = None
        return row

    def step(self, state: State) -> list[Step]:
        if state.text not in self._steps:
            chances: dict[Step, float] = {}
            for chance, step in self._step(state):
                chances[step] = chances.get(step, 0.0) + chance
            self._steps[state.text] = [replace(step, probability=chance) for step, chance in chances.items()]
        return self._steps[state.text]

    def _step(self, state: State) -> Iterator[tuple[float, Step]]:
        self._text = state.text
        return super()._step(state)

    def tree(self, drafts: list[Draft], position: int) -> DraftTree:
        tree = super().tree(drafts, position)
        walks = [walked(self.grammar, self._output(self._text), self.pair.vocabulary) for _ in drafts]
        found, broken = grammar_trees.constrain(tree, walks, [self.room] * len(drafts))
        for b, nodes in enumerate(broken):
            rows = PlainTree.of(found, b)
            assert all(not rows.children[node] for node in nodes), "what breaks the grammar is a leaf"
        return found

    def commit(self, sequence: Sequence, tokens: Text) -> None:
        sequence.params = replace(self.params, grammar=self.grammar)
        sequence.eos = frozenset({ENDING})
        ends = begin_walk(sequence, self.pair.vocabulary)
        assert ends is not None
        for token in sequence.output:
            ends.commit(token)
        sequence.commit(tokens)

    def law_of_plain_decoding(self, length: int, eos: frozenset[int] = frozenset()) -> dict[Text, float]:
        """One token after the other, and a state for each that has never gone back."""
        law_of: dict[Text, float] = {}

        def grow(output: Text, probability: float) -> None:
            state = self.grammar.start()
            ended = any(not state.take(token) for token in output)
            if len(output) == length or ended or state.must_end:
                law_of[output] = law_of.get(output, 0.0) + probability
                return
            allowed = state.allowed(self.pair.vocabulary)
            allowed[ENDING] = state.may_end
            p = self._masked((*self.prompt, *output), (), allowed)
            for token in np.flatnonzero(p).tolist():
                grow((*output, token), probability * float(p[token]))

        grow((), 1.0)
        return law_of


class GrammarToyEngine(WithGrammar): ...


class MergedGrammarToyEngine(WithGrammar, MergedToyEngine): ...
