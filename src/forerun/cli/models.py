"""`forerun models`: which models are on this machine, and fetching, verifying and removing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output, print_whole
from forerun.cli.enlarge import enlarge
from forerun.cli.model_options import loading

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.models.inventory import Cached

models = typer.Typer(
    name="models",
    rich_markup_mode="rich",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(help="As `forerun models` shows it.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@models.callback()
def list_models(context: typer.Context, as_json: Json = False) -> None:
    """Models on this machine: the list of them; fetch, verify or remove one.

    Wherever Forerun wants a model, give a name of this list, a folder with a Hugging Face model, a GGUF file, or
    owner/model on the Hugging Face hub. Folders are used where they are. The cache is in ~/.cache/forerun, or where the
    environment variable FORERUN_CACHE says.

    [bold]Examples[/]

    What is there:  [green]forerun models[/]

    Fetch the built-in model now, not at first use:  [green]forerun models fetch smollm2-135m[/]

    Convert a GGUF file ahead of time:  [green]forerun models fetch model.gguf --dtype float32[/]
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise ValueError(f"--json comes last: write `forerun models {context.invoked_subcommand} ... --json`")
        return
    from forerun.models.inventory import inventory
    from forerun.models.store import Store

    store = Store.default()
    found = inventory(store)
    if as_json:
        typer.echo(json.dumps({"cache": str(store.root), "models": [_as_dict(each) for each in found]}, indent=2))
        return
    print_whole(output(), *show(found, store.root))


def _as_dict(cached: Cached) -> dict[str, Any]:
    return {
        "name": cached.name,
        "kind": cached.kind,
        "present": cached.present,
        "bytes": cached.bytes,
        "formats": list(cached.formats),
        "paths": [str(path) for path in cached.paths],
    }


def show(found: list[Cached], root: Path) -> list[RenderableType]:
    from forerun.models.builtin import BUILTINS

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("model", "kind", "size", "as"):
        table.add_column(title, justify="right" if title == "size" else "left", no_wrap=True)
    for cached in found:
        size = _size(cached.bytes) if cached.present else "not fetched"
        style = "bold cyan" if cached.present else "dim"
        table.add_row(Text(cached.name, style=style), cached.kind, size, ", ".join(cached.formats))
    parts: list[RenderableType] = [table, Text()]
    for cached in found:
        if cached.name in BUILTINS and not cached.present:
            builtin = BUILTINS[cached.name]
            parts.append(Text(f"{builtin.name}: {builtin.summary}, {builtin.licence}, {_size(builtin.size)} to fetch"))
    parts.append(Text(f"Cache: {root}", style="dim", no_wrap=True, overflow="ignore"))
    return parts


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A built-in model, owner/model, or a GGUF file.", show_default=False)],
    *,
    dtype: Annotated[
        str, typer.Option(help="Number format to convert GGUF weights to: auto, float32, bfloat16, float16.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Fetch a model, check it, and convert it if it is a GGUF file, so that the first use does not wait.

    [bold]Examples[/]

    The built-in model:  [green]forerun models fetch smollm2-135m[/]

    From the hub:  [green]forerun models fetch Qwen/Qwen3-0.6B --revision main[/]
    """
    from forerun.models.checkpoint import check
    from forerun.models.load import resolve
    from forerun.models.precision import parse_dtype
    from forerun.models.store import folder_size

    with loading(f"Looking for {name}") as report:
        source = resolve(name, dtype=parse_dtype(dtype), revision=revision, progress=report)
    if source.config is not None:
        check(source.folder, source.config)
    family = str(source.hf_config.get("model_type"))
    size = folder_size(source.folder)
    if as_json:
        answer = {"name": name, "kind": source.kind, "family": family, "folder": str(source.folder), "bytes": size}
        typer.echo(json.dumps(answer, indent=2))
        return
    ready = Text.assemble((name, "bold cyan"), f" is ready: {family}, {_size(size)}, in {source.folder}")
    output().print(ready, soft_wrap=True)  # a path is there to be copied


@models.command()
def verify(name: Name, *, as_json: Json = False) -> None:
    """Read every file of a cached model again, and compare its hash with the one it had when it was fetched or made.

    [bold]Example[/]

    Is it whole?  [green]forerun models verify smollm2-135m[/]
    """
    from forerun.models.inventory import find
    from forerun.models.inventory import verify as verify_cached
    from forerun.models.store import Store

    cached = find(name, Store.default())
    if not cached.present:
        raise ValueError(f"{name} was not fetched yet: run `forerun models fetch {name}` first")
    with loading(f"Verifying {name}") as report:
        count = verify_cached(cached, report)
    if as_json:
        typer.echo(json.dumps({"name": name, "files": count, "bytes": cached.bytes}, indent=2))
        return
    output().print(Text.assemble((name, "bold cyan"), f" is whole: {count} files, {_size(cached.bytes)}"))


@models.command()
def remove(
    name: Name,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a model from the cache. Folders and GGUF files that are your own stay where they are.

    [bold]Example[/]

    Without a question:  [green]forerun models remove smollm2-135m --yes[/]
    """
    from forerun.models.inventory import find
    from forerun.models.inventory import remove as remove_cached
    from forerun.models.store import Store

    cached = find(name, Store.default())
    if not cached.present:
        raise ValueError(f"{name} is not in the cache: there is nothing to remove")
    if not yes:
        if as_json:
            raise ValueError("--json asks no questions: add --yes")
        typer.confirm(f"Remove {name} ({_size(cached.bytes)})?", abort=True)
    remove_cached(cached)
    if as_json:
        typer.echo(json.dumps({"name": name, "bytes": cached.bytes, "removed": list(map(str, cached.paths))}, indent=2))
        return
    output().print(Text.assemble((name, "bold cyan"), f" is removed: {_size(cached.bytes)} are free"))


models.command()(enlarge)
