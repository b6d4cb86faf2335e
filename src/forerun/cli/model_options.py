"""The flags that all commands with a model share, in two groups: which model and drafter, and how to sample.

A group is a dataclass whose fields are annotated as typer wants them. `takes` gives a command the flags of its groups
and hands it the filled dataclasses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

if TYPE_CHECKING:
    from forerun.core.params import SamplingParams
    from forerun.engine.llm import LLM
    from forerun.engine.loaded import LoadedModel
    from forerun.models.checkpoint import Progress as Told

WHICH = "Model and drafter"
HOW = "Sampling"
DTYPES = (
    "auto, float32, bfloat16 or float16. On a CPU without matrix units auto is float32, and where weights have 4 or 8 "
    "bits, what they are multiplied with has 16."
)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, in what precision, with which drafter."""

    model: Annotated[
        str,
        typer.Option(help="A built-in name, a folder, a GGUF file or a Hugging Face id.", rich_help_panel=WHICH),
    ] = "smollm2-135m"
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Who runs ahead: none, ngram, eagle3, …, or a trained drafter's folder.",
            show_default="none",
            rich_help_panel=WHICH,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(help="A smaller model with the same tokenizer, as for --model.", rich_help_panel=WHICH),
    ] = None
    drafter_option: Annotated[
        list[str],
        typer.Option(help="An option of the drafter; may be given again.", metavar="KEY=VALUE", rich_help_panel=WHICH),
    ] = ()  # type: ignore[assignment]  # typer wants the type, a dataclass a default that cannot change
    tree: Annotated[
        str | None,
        typer.Option(help='What to draft: "5", "3,2,1", "fixed:3,2,1", "dynamic:8,5,40".', rich_help_panel=WHICH),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            help="The verification rule, see `forerun rules`.", show_default="strongest", rich_help_panel=WHICH
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help=DTYPES, rich_help_panel=WHICH)] = "auto"
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="auto", rich_help_panel=WHICH)
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.", rich_help_panel=WHICH)
    ] = None
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.", rich_help_panel=WHICH)] = False

    @property
    def drafter_name(self) -> str:
        return self.drafter or ("draft_model" if self.draft_model else "none")

    @property
    def lossless(self) -> bool:
        """Whether the rule keeps the model's law. One that does not is only had by its name, and has to be told."""
        from forerun.verify.rule import all_rules

        return self.rule not in all_rules() or all_rules()[self.rule].lossless

    def open(self, *, trace: Path | None = None, **more: Any) -> LLM:
        """The model, loaded with a bar or a spinner on stderr."""
        with loading(f"Loading {self.model}") as told:
            from forerun.engine.llm import LLM  # torch
            from forerun.models.static import capture

            capture.listeners[:] = [FirstOnly()]
            return LLM(
                self.model,
                self.drafter_name,
                drafter_options=self.read_drafter_options(),
                tree=self.tree,
                rule=self.rule,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
                offline=self.offline,
                trace=trace,
                progress=told,
                **more,
            )

    def load(self) -> LoadedModel:
        """The model alone, for who makes engines for it."""
        with loading(f"Loading {self.model}") as told:
            from forerun.engine.loaded import LoadedModel  # torch
            from forerun.models.static import capture

            capture.listeners[:] = [FirstOnly()]
            return LoadedModel.load(
                self.model,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
                offline=self.offline,
                progress=told,
            )

    def read_drafter_options(self) -> dict[str, Any]:
        """As they were written: what they mean is the drafter's business."""
        options: dict[str, Any] = {} if self.draft_model is None else {"model": self.draft_model}
        for pair in self.drafter_option:
            key, equals, value = pair.partition("=")
            if not key or not equals:
                raise ValueError(f"--drafter-option is {pair!r}: write it as KEY=VALUE")
            options[key] = value
        return options


class FirstOnly:
    """Tells that kernels are built for the device, the first time that something is: later times take a moment."""

    def __init__(self) -> None:
        self.told = False

    def __call__(self, line: str) -> None:
        if not self.told:
            self.told = True
            console = Console(stderr=True)
            if console.is_terminal:
                console.print(
                    f"[dim]{line}: kernels are built once for this device and kept, which may take a minute[/dim]"
                )


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn, and where the text ends."""

    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token, 1 samples.", rich_help_panel=HOW)
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=HOW)] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens with this much probability.", rich_help_panel=HOW)
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this times the likeliest.", rich_help_panel=HOW)
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: against tokens of prompt and text.", rich_help_panel=HOW)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: against tokens that the text has.", rich_help_panel=HOW)
    ] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="Above 0: the same, for each time.", rich_help_panel=HOW)] = (
        0.0
    )
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same text, whatever drafts (by the rule gumbel).", rich_help_panel=HOW),
    ] = None
    max_tokens: Annotated[int, typer.Option(help="The longest text.", rich_help_panel=HOW)] = 256
    stop: Annotated[
        list[str], typer.Option(help="The text ends before this; may be given again.", rich_help_panel=HOW)
    ] = ()  # type: ignore[assignment]
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=HOW)] = (
        False
    )

    def params(self, **more: Any) -> SamplingParams:
        from forerun.core.params import SamplingParams

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**own, "stop": tuple(self.stop), **more})


def parse_value(name: str, text: str, kind: type) -> Any:
    """What a user wrote, as a value of that type."""
    if kind is bool:
        if text.lower() in {"true", "false"}:
            return text.lower() == "true"
        raise ValueError(f"{name} is {text!r}: give true or false")
    if kind in {int, float}:
        try:
            return kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise ValueError(f"{name} is {text!r}: give a {what}") from None
    return text


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of each group, and the command an instance of it under the group's name.

    The command's own parameters come first in its help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
        flags = [flag for group in groups.values() for flag in _flags(group)]

        @functools.wraps(command)
        def filled(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
            command(**given)

        filled.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        return filled

    return decorate


def _flags(group: Any) -> Sequence[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=[] if field.default == () else field.default,
        )
        for field in fields(group)
    ]


@contextmanager
def loading(what: str) -> Iterator[Told]:
    """A spinner on stderr, and a bar while bytes are counted; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[size]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, size="")

        def tell(doing: str, done: int, total: int) -> None:
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            bar.update(task, description=doing, completed=done, total=total or None, size=size)

        yield tell
