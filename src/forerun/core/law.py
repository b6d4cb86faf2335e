"""The one place that turns logits into the law a token is drawn from.

Target and drafter both come here with the same settings: a token's acceptance compares p with q *after* the
request's transform, and a residual is never transformed again. Rows are independent: each has its own
settings, and its penalties see its own context, the committed text and the drafted path that leads to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from forerun.core import exact
from forerun.core.largest import above
from forerun.core.native import choice as native
from forerun.core.params import SamplingParams
from forerun.core.transfer import to_device


@dataclass(frozen=True)
class LawSettings:
    """`SamplingParams` of R rows as columns of tensors, made once per request and step.

    The plain booleans and numbers say what any row needs, known on the host, so that work nobody asked for
    is not done and no device is asked about it.
    """

    temperature: Tensor  # [R, 1]; 0 for greedy rows
    top_k: Tensor  # [R, 1]; 0 keeps all
    top_p: Tensor  # [R, 1]
    min_p: Tensor  # [R, 1]
    repetition: Tensor  # [R, 1]
    presence: Tensor  # [R, 1]
    frequency: Tensor  # [R, 1]
    bias_tokens: Tensor  # [R, K]; padded with token 0
    bias_values: Tensor  # [R, K]; padded with 0.0
    largest_bias_token: int  # -1 without any
    penalises: bool
    largest_top_k: int
    truncates_mass: bool  # some row has top_p < 1
    truncates_ratio: bool  # some row has min_p > 0
    all_greedy: bool
    some_greedy: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> LawSettings:
        """One row for each of `params`."""
        if not params:
            raise ValueError("a law needs the settings of at least one row")

        def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return to_device(values, place, dtype)[:, None]

        place = torch.device(device)
        longest = max(len(row.logit_bias) for row in params)
        tokens = [list(row.logit_bias) + [0] * (longest - len(row.logit_bias)) for row in params]
        values = [
            [float(v) for v in row.logit_bias.values()] + [0.0] * (longest - len(row.logit_bias)) for row in params
        ]
        return cls(
            temperature=column([row.temperature for row in params]),
            top_k=column([row.top_k for row in params], torch.int64),
            top_p=column([row.top_p for row in params]),
            min_p=column([row.min_p for row in params]),
            repetition=column([row.repetition_penalty for row in params]),
            presence=column([row.presence_penalty for row in params]),
            frequency=column([row.frequency_penalty for row in params]),
            bias_tokens=to_device(tokens, place).view(len(params), longest),
            bias_values=to_device(values, place, torch.float64).view(len(params), longest),
            largest_bias_token=max((token for row in params for token in row.logit_bias), default=-1),
            penalises=any(row.penalises for row in params),
            largest_top_k=max(row.top_k for row in params),
            truncates_mass=any(row.top_p < 1 for row in params),
            truncates_ratio=any(row.min_p > 0 for row in params),
            all_greedy=all(row.greedy for row in params),
            some_greedy=any(row.greedy for row in params),
        )

    def take(self, rows: Tensor) -> LawSettings:
        """The settings of `rows` [R'], for instance one request's settings for each node of its tree."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        picked: dict[str, Any] = {name: value[rows] for name, value in columns.items() if isinstance(value, Tensor)}
        return replace(self, **picked)


@dataclass(frozen=True)
class Context:
    """What the penalties of each row see: the committed text of its sequence and its own drafted path."""

    prompt: Tensor  # [S, V] bool: the token occurs in the prompt of sequence s
    output: Tensor  # [S, V] counts of committed output tokens
    sequence: Tensor  # [R]: the sequence a row belongs to
    path: Tensor  # [R, D]: drafted tokens between the root and the row's node, padded with -1

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocabulary: int,
        sequence: Tensor,
        path: Tensor,
    ) -> Context:
        """Count tokens from lists; the engine keeps these counts up to date instead."""
        for name, texts in (("prompt", prompts), ("output", outputs)):
            strays = [token for tokens in texts for token in tokens if not 0 <= token < vocabulary]
            if strays:
                raise ValueError(f"{name} token {strays[0]} is outside the vocabulary of {vocabulary}")
        prompt = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
        output = torch.zeros(len(outputs), vocabulary, dtype=torch.int64)
        for row, tokens in enumerate(prompts):
            prompt[row, list(tokens)] = True
        for row, tokens in enumerate(outputs):
            index = torch.tensor(list(tokens), dtype=torch.int64)
            output[row].scatter_add_(0, index, torch.ones_like(index))
        device = path.device
        return cls(prompt.to(device), output.to(device), sequence, path)

    def seen(self) -> tuple[Tensor, Tensor]:
        """[R, V] whether a token occurs anywhere, and how often it occurs in the output."""
        counts = self.output[self.sequence]
        drafted = self.path >= 0
        counts = counts.scatter_add(1, self.path.clamp_min(0), drafted.to(counts.dtype))
        return self.prompt[self.sequence] | (counts > 0), counts


def law(
    logits: Tensor,
    settings: LawSettings,
    context: Context | None = None,
    mask: Tensor | None = None,
    *,
    checked: bool = False,
) -> Tensor:
    """Logits [R, V] to probabilities [R, V], in float32 (float64 stays float64).

    `mask` [R, V] comes from outside, from a grammar for instance: False forbids the token. `checked` says that the
    caller sees to broken logits itself: whether there are any is a question that a device has to be waited for.
    """
    _refuse_misfits(logits, settings, context, mask)
    scores = _scores(logits, settings, context, mask)
    choice = exact.argmax(scores)[:, None]
    best = scores.gather(1, choice)
    if not checked:
        _refuse_bad_rows(logits, best, mask)
    if settings.all_greedy:
        return torch.zeros_like(scores).scatter_(1, choice, 1.0)

    if native.usable(scores):
        columns = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        return native.laws(scores, best, choice, *columns)
    greedy = settings.temperature == 0
    # The largest score becomes 0, so that no temperature overflows; one that this float type would round to 0 or to
    # infinity would make 0/0 or -inf/inf of a row.
    limits = torch.finfo(scores.dtype)
    temperature = settings.temperature.masked_fill(greedy, 1.0).clamp(limits.tiny, limits.max).to(scores.dtype)
    if settings.largest_top_k > 0:
        scores = _keep_top_k(scores, settings)
    scores = (scores - best) / temperature
    p = torch.softmax(scores, -1)
    if settings.truncates_mass or settings.truncates_ratio:
        # Softmax again instead of dividing by a sum: it is the same for a row in any batch, and rows that keep
        # all their tokens keep their bits.
        p = torch.softmax(scores.masked_fill(p < _threshold(p, settings), -torch.inf), -1)
    if not settings.some_greedy:
        return p
    one_hot = torch.zeros_like(p).scatter_(1, choice, 1.0)
    return torch.where(greedy, one_hot, p)


def _refuse_misfits(logits: Tensor, settings: LawSettings, context: Context | None, mask: Tensor | None) -> None:
    """Shapes that would be broadcast: one row's context or mask silently used for all."""
    rows = settings.temperature.shape[0]
    if logits.dim() != 2 or logits.shape[0] != rows or logits.shape[1] == 0:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit the settings of {rows} rows: "
            f"one row of logits for each is needed"
        )
    if settings.largest_bias_token >= logits.shape[1]:
        raise ValueError(
            f"logit_bias names token {settings.largest_bias_token}, but the vocabulary ends at {logits.shape[1] - 1}"
        )
    if mask is not None and (mask.shape != logits.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"the mask is {mask.dtype} of shape {tuple(mask.shape)}: it must be bool, of the logits' shape "
            f"{tuple(logits.shape)}"
        )
    if context is not None and not (
        context.sequence.shape == context.path.shape[:1] == (rows,)
        and context.prompt.shape == context.output.shape == (context.prompt.shape[0], logits.shape[1])
    ):
        raise ValueError(
            f"the context does not fit logits of shape {tuple(logits.shape)}: sequence and path need {rows} rows, "
            f"prompt and output {logits.shape[1]} tokens"
        )


def _scores(logits: Tensor, settings: LawSettings, context: Context | None, mask: Tensor | None) -> Tensor:
    """Penalties, bias and mask, on logits."""
    scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if settings.penalises:
        if context is None:
            raise ValueError("penalties need the context of each row: pass context=Context(...)")
        if bool((context.path >= logits.shape[1]).any()):
            raise ValueError(
                f"a drafted token lies outside the vocabulary of {logits.shape[1]}: check the context's path"
            )
        seen, counts = context.seen()
        repetition = settings.repetition.to(scores.dtype)
        scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, scaled, scores)
        presence = settings.presence.to(scores.dtype) * (counts > 0)
        frequency = settings.frequency.to(scores.dtype) * counts
        scores = scores - presence - frequency
    if settings.bias_tokens.shape[1] > 0:
        scores = scores.scatter_add(1, settings.bias_tokens, settings.bias_values.to(scores.dtype))
    if mask is not None:
        broken = ~(scores.max(-1, keepdim=True).values < torch.inf)  # a mask must not hide NaN or +infinity
        scores = scores.masked_fill(~mask, -torch.inf).masked_fill(broken, torch.nan)
    return scores


def _refuse_bad_rows(logits: Tensor, best: Tensor, mask: Tensor | None) -> None:
    """A NaN makes the row's maximum NaN, so R numbers tell about all of them."""
    if math.isfinite(float(best.sum())):  # of finite numbers that are far from the largest there are
        return
    good = torch.isfinite(best[:, 0])
    if bool(good.all()):
        return
    row = int((~good).nonzero()[0, 0])
    if bool(torch.isnan(logits[row]).any()):
        raise ValueError(f"the logits of row {row} hold NaN: the model's output is broken")
    if mask is not None and not bool(mask[row].any()):
        raise ValueError(f"the mask of row {row} is empty: it must allow at least one token")
    if bool((logits[row] == torch.inf).any()):
        raise ValueError(f"the logits of row {row} hold +infinity: the model's output is broken")
    if bool(best[row, 0] == -torch.inf):
        raise ValueError(f"row {row} has no token left: logits, mask and logit_bias forbid every one")
    raise ValueError(f"the scores of row {row} overflow: a penalty or a logit_bias is too large")


def _keep_top_k(scores: Tensor, settings: LawSettings) -> Tensor:
    largest = min(settings.largest_top_k, scores.shape[1])
    values = scores.topk(largest, -1).values
    last = values.gather(1, (settings.top_k.clamp(1, largest) - 1))
    keep = (scores >= last) | (settings.top_k == 0)
    return scores.masked_fill(~keep, -torch.inf)


def _threshold(p: Tensor, settings: LawSettings) -> Tensor:
    """[R, 1] the least probability that top_p and min_p keep.

    Both keep the tokens at or above it, so tied tokens stand or fall together, and the cumulative sums are
    exact: the same logits keep the same tokens in any batch.
    """
    threshold = torch.zeros_like(p[:, :1])
    if settings.truncates_mass:
        threshold = _mass_threshold(p, settings.top_p).masked_fill_(settings.top_p >= 1, 0)
    if settings.truncates_ratio:
        by_ratio = settings.min_p.to(p.dtype) * p.max(-1, keepdim=True).values
        threshold = torch.maximum(threshold, by_ratio)
    return threshold


def _mass_threshold(p: Tensor, top_p: Tensor) -> Tensor:
    """[R, 1] the probability of the token at which the most likely ones first hold `top_p` of the mass.

    Mass is counted in integers, so a sum over some of the tokens and a sum over all are the same number, and a row gets
    the same threshold from either.
    """
    wanted = top_p * exact.fixed(p).sum(-1, keepdim=True).to(torch.float64)
    descending = p
    if p.device.type == "cpu" and p.shape[0]:  # elsewhere asking for their number would stall
        descending = _likely(p, top_p)
    descending = descending.sort(-1, descending=True).values
    return _reached(descending, exact.fixed(descending).cumsum(-1).to(torch.float64), wanted)


def _likely(p: Tensor, top_p: Tensor) -> Tensor:
    """[R, K] the tokens of each row that can matter to `top_p`, padded with 0. Those below (1 − top_p) / 2V hold less
    than half of what top_p leaves out, all together."""
    least = (1 - top_p).clamp_min(0) / (2 * p.shape[1])
    row, token = above(p, least.to(p.dtype))
    counts = torch.bincount(row, minlength=p.shape[0])
    table = p.new_zeros(p.shape[0], int(counts.max()))
    table[row, torch.arange(row.shape[0]) - (counts.cumsum(0) - counts)[row]] = p[row, token]
    return table


def _reached(descending: Tensor, cumulative: Tensor, wanted: Tensor) -> Tensor:
    last = (cumulative < wanted).sum(-1, keepdim=True).clamp_max(descending.shape[1] - 1)
    return descending.gather(1, last)
