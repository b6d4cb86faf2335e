"""One text's way through its grammar: behind what is committed, and down the paths of a draft and back."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from forerun.core.grammar import Grammar
from forerun.core.params import SamplingParams
from forerun.core.sequence import Sequence

UNWANTED = -1e30
"""A bias that leaves no probability beside any other token, and some beside none."""


class Walk:
    """Stands behind the committed text. It never changes what a token's law is but by the tokens before it."""

    def __init__(self, grammar: Grammar, endings: frozenset[int], vocabulary: int) -> None:
        """`endings` are the tokens that end the text; they may come where the text is whole."""
        self._state = grammar.start()
        self._endings = [end for end in sorted(endings) if end < vocabulary]
        self._vocabulary = vocabulary
        self._ended = False
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._forced: list[int] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing can follow: an ending came, or the grammar has no more to say."""
        return self._ended or self._state.must_end

    def enter(self, token: int) -> bool:
        """Down to a drafted token; False, and it stays where it is, where the token may not come."""
        if self.over:
            return False
        if token in self._endings and self._state.may_end:
            self._ended = True
            return True
        return self._state.take(token)

    def leave(self) -> None:
        """Back up from the token entered last."""
        if self._ended:
            self._ended = False
        else:
            self._state.back(1)

    def forced_next(self) -> list[int]:
        """What must follow where it stands, as far as it is known."""
        return [] if self.over or self._state.may_end else self._state.forced()

    def forced(self) -> list[int]:
        """What must follow the committed text."""
        if self._forced is None:
            self._forced = self.forced_next()
        return self._forced

    def mask(self, path: Many[int]) -> Tensor:
        """[V] what may follow the committed text and a drafted path. Behind the end of the text, and on a path that
        breaks the grammar, nothing is ever kept, so that anything may follow."""
        key = tuple(path)
        if key not in self._masks:
            entered = 0
            while entered < len(key) and self.enter(key[entered]):
                entered += 1
            self._masks[key] = self._allowed() if entered == len(key) else self._anything()
            for _ in range(entered):
                self.leave()
        return self._or_anything(self._masks[key])

    def mask_here(self, path: Many[int]) -> Tensor:
        """The same, where it stands behind `path` already."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._allowed()
        return self._or_anything(self._masks[key])

    def commit(self, token: int) -> bool:
        """The text has this token now. False where the grammar cannot follow: it gave up at a limit of its own."""
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path and path[0] == token}
        self._forced = None
        return self.enter(token)

    @property
    def whole(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self._state.may_end

    @property
    def stuck(self) -> bool:
        """Whether no token may follow the committed text, not even an ending."""
        if () not in self._masks:
            self._masks[()] = self._allowed()
        return not bool(self._masks[()].any())

    def _allowed(self) -> Tensor:
        """[V] where it stands."""
        if self.over:
            return self._anything()
        allowed = self._state.allowed(self._vocabulary)
        if self._state.may_end:
            allowed[self._endings] = True
        return allowed

    def _or_anything(self, mask: Tensor) -> Tensor:
        """A law needs some token. What comes where none may is cut off."""
        return mask if bool(mask.any()) else self._anything()

    def _anything(self) -> Tensor:
        return torch.ones(self._vocabulary, dtype=torch.bool)


def refuse_misfit(params: SamplingParams, vocabulary: int) -> None:
    """A grammar in which not even a first token can be written."""
    if params.grammar is not None and Walk(params.grammar, frozenset(), vocabulary).stuck:
        raise ValueError(
            "the grammar allows no token that this model can write: make it with the model's own tokenizer"
        )


def reconciled(params: SamplingParams) -> SamplingParams:
    """Where logit_bias forbids all that the grammar allows, the grammar wins: so what is forbidden becomes so unlikely
    that it only comes where nothing else may."""
    if params.grammar is None or not params.logit_bias:
        return params
    bias = {token: max(float(added), UNWANTED) for token, added in params.logit_bias.items()}
    return replace(params, logit_bias=bias)


def begin_walk(sequence: Sequence, vocabulary: int) -> Walk | None:
    """The walk of a text that has a grammar, which from now on goes along with all that the text commits."""
    grammar = sequence.params.grammar
    if grammar is None:
        return None
    walk = Walk(grammar, sequence.eos, vocabulary)
    stop = sequence.ends

    def ends(output: list[int]) -> bool:
        followed = walk.commit(output[-1])
        if not followed or (walk.stuck and not walk.whole):  # the grammar gave up
            sequence.max_tokens = len(output)  # cut here, as by a limit of the request
            return stop(output)
        return stop(output) or walk.over or walk.stuck

    sequence.ends = ends
    return walk
