"""The flags of `forerun train`: what is made, how it learns, and from what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.train.answers import AnswerOptions
    from forerun.train.run import Settings

LEARNING, DATA, SHAPE = "Learning", "Answers to learn from", "The drafter (which methods take it)"


@dataclass(frozen=True)
class ShapeOptions:
    """What the drafter looks like and what its loss is; each method takes some of these."""

    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="draft: layers of the model; medusa: blocks of each head.",
            show_default="draft: 2, medusa: 1",
            rich_help_panel=SHAPE,
        ),
    ] = None
    hidden: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="draft: its width; with another than the target's it begins as noise, with matrices of its own.",
            show_default="the target's",
            rich_help_panel=SHAPE,
        ),
    ] = None
    own_matrices: Annotated[
        bool | None,
        typer.Option(
            "--own-matrices",
            help="draft: an embedding and a head of its own, in place of the target's; it is a model like others then.",
            show_default=False,
            rich_help_panel=SHAPE,
        ),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="blockwise, medusa, parallel: how many tokens ahead are foreseen.",
            show_default="4",
            rich_help_panel=SHAPE,
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="All but parallel: how many tokens can be drafted, the most frequent ones; 0 for all.",
            show_default="8192",
            rich_help_panel=SHAPE,
        ),
    ] = None
    inner: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="eagle, eagle3, mtp: the width of the MLP; blockwise: that of the hidden layer.",
            show_default="the target's",
            rich_help_panel=SHAPE,
        ),
    ] = None
    stem: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="medusa: the width of a layer by which all heads also see the token that the state gave; 0 for none, "
            "as published. Other engines know no such layer.",
            show_default="0",
            rich_help_panel=SHAPE,
        ),
    ] = None
    attention_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="eagle, eagle3, mtp: heads of attention, each with its own keys.",
            show_default="the target's",
            rich_help_panel=SHAPE,
        ),
    ] = None
    unroll: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            help="eagle, eagle3, mtp: steps that it goes on from its own states.",
            show_default="eagle: 1, others: 7",
            rich_help_panel=SHAPE,
        ),
    ] = None
    noise: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="eagle, eagle3, mtp: noise on the target's states, in their standard deviations.",
            show_default="eagle: 0.1, others: 0",
            rich_help_panel=SHAPE,
        ),
    ] = None
    soft: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="All but draft and parallel: how much the target's law counts; the rest goes to the token written.",
            show_default="1",
            rich_help_panel=SHAPE,
        ),
    ] = None
    backbone: Annotated[
        bool | None,
        typer.Option(
            "--backbone",
            help="blockwise, medusa: then let the target's own layers learn too, as many steps again. That makes a new "
            "model, in OUT/backbone, whose text is no longer the original's.",
            show_default=False,
            rich_help_panel=SHAPE,
        ),
    ] = None
    backbone_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --backbone: the layers' learning rate, as a share of the heads'.",
            show_default="0.125",
            rich_help_panel=SHAPE,
        ),
    ] = None
    anchors: Annotated[
        int | None,
        typer.Option(
            min=1, help="parallel: places of a text to look ahead from.", show_default="16", rich_help_panel=SHAPE
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TrainOptions:
    """How much is asked and learned."""

    steps: Annotated[int, typer.Option(min=1, help="Steps of training, at most.", rich_help_panel=LEARNING)] = 2000
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Minutes of learning, at most; the learning rate falls to nothing by then.", rich_help_panel=LEARNING
        ),
    ] = None
    batch: Annotated[
        int, typer.Option(min=1, help="Texts in a step, of all processes together.", rich_help_panel=LEARNING)
    ] = 16
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Instead as many texts of like length as have no more tokens together.",
            show_default=False,
            rich_help_panel=LEARNING,
        ),
    ] = 0
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The highest: it rises at first, then falls to nothing.",
            show_default="by method",
            rich_help_panel=LEARNING,
        ),
    ] = None
    optimizer: Annotated[str, typer.Option(help="How weights are moved: adamw or muon.", rich_help_panel=LEARNING)] = (
        "adamw"
    )
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between two measurements.",
            show_default="ten in all",
            rich_help_panel=LEARNING,
        ),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measurements without a better one before it ends early.",
            show_default="5; with --time-limit it does not",
            rich_help_panel=LEARNING,
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of answers, order and first weights.", rich_help_panel=LEARNING)] = 0
    bits: Annotated[
        int,
        typer.Option(
            min=4,
            max=16,
            help="In which weights are stored, 16, 8, 6 or 4; with fewer than 16 they also learn rounded.",
            rich_help_panel=LEARNING,
        ),
    ] = 16
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.", rich_help_panel=DATA)] = 256
    longest: Annotated[
        int, typer.Option(min=2, help="The longest text, prompt and answer together.", rich_help_panel=DATA)
    ] = 2048
    sampled: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="The share of prompts answered at temperature 1; the others are answered greedily.",
            rich_help_panel=DATA,
        ),
    ] = 0.5
    times: Annotated[
        int,
        typer.Option(
            min=1, help="How often each prompt is answered; all but the first time by sampling.", rich_help_panel=DATA
        ),
    ] = 1
    emphasis: Annotated[
        str,
        typer.Option(
            help="Categories of prompts whose answers are learned more often than others, as rag=3,summarization=2.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = ""
    held_back: Annotated[
        int, typer.Option(min=1, help="Prompts to measure with and not to learn from.", rich_help_panel=DATA)
    ] = 32

    def asking(self) -> AnswerOptions:
        from forerun.train.answers import AnswerOptions

        return AnswerOptions(self.max_tokens, self.sampled, self.seed, self.longest, self.times)

    def settings(self, method: str, shape: ShapeOptions) -> Settings:
        from forerun.train.loop import LoopOptions
        from forerun.train.methods.find import LEARNING_RATES, method_options
        from forerun.train.optimizers import OPTIMIZERS
        from forerun.train.prompts import read_emphasis
        from forerun.train.run import Settings

        rate = self.learning_rate
        if rate is not None and not 0 < rate < 1:
            raise ValueError(f"--learning-rate is {rate:g}: give a number above 0 and below 1, as 3e-4")
        if self.time_limit is not None and not 0 < self.time_limit < 1e6:
            raise ValueError(f"--time-limit is {self.time_limit:g}: give minutes, a number above 0")
        chosen = next((name for name in OPTIMIZERS if name == self.optimizer), None)
        if chosen is None:
            raise ValueError(f"there is no optimizer {self.optimizer!r}: use one of {', '.join(OPTIMIZERS)}")
        if self.bits not in (4, 6, 8, 16):
            raise ValueError(f"--bits is {self.bits}: give 16, 8, 6 or 4")
        return Settings(
            method=method,
            options=method_options(method, shape.given()),
            answers=self.asking(),
            loop=LoopOptions(
                steps=self.steps,
                batch=self.batch,
                batch_tokens=self.batch_tokens,
                learning_rate=rate or LEARNING_RATES.get(method, LoopOptions.learning_rate),
                optimizer=chosen,
                every=self.every,
                patience=self.patience or (5 if self.time_limit is None else None),
                time_limit=None if self.time_limit is None else 60 * self.time_limit,
                seed=self.seed,
            ),
            held_back=self.held_back,
            bits=self.bits,
            emphasis=read_emphasis(self.emphasis),
        )
