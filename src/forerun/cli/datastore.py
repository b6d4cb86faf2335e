"""`forerun datastore`: makes the file that the drafter `retrieval` looks texts up in, and tells what one holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.console import output
from forerun.cli.files import check_writable
from forerun.cli.model_options import loading

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.models.checkpoint import Progress
    from forerun.models.tokenizer import Tokenizer

datastore = typer.Typer(
    name="datastore",
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Texts for the drafter retrieval to look things up in: build a datastore, or see what one holds.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

PIECE = 2048
"""Characters that are tokenized at once, up to the end of a line: tokenizers complain about texts beyond their model's
context. At the seams a token may differ, one in some hundred."""


@dataclass
class Reading:
    """What became of the files of a folder."""

    read: int = 0
    binary: int = 0
    undecodable: int = 0
    unreadable: int = 0
    cut: bool = False
    """Whether --limit-tokens left something out."""

    @property
    def skipped(self) -> str:
        kinds = ("binary", "undecodable", "unreadable")
        told = [f"{count} {kind}" for kind in kinds if (count := getattr(self, kind))]
        return f", skipped {' and '.join(told)}" if told else ""


@datastore.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Texts or code; with everything below it.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(help="The file to write.", show_default=False)],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer: a built-in name, a folder, a GGUF file or a Hugging Face id.")
    ] = "smollm2-135m",
    glob: Annotated[
        list[str], typer.Option(help="Only files with such a name; may be given again.", show_default="*")
    ] = (),  # type: ignore[assignment]  # typer wants the type, a default must not change
    limit_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Make a datastore of all texts in a folder.

    Files whose name begins with a dot are left out, and so are folders of that kind. What is not text in UTF-8 is
    skipped. A store is for one tokenizer: any model of the same family can use it, a model of another cannot. It takes
    6 bytes of disk a token, and making it 40 of memory.

    [bold]Examples[/]

    Of code:  [green]forerun datastore build src --glob '*.py' --out code.store[/]

    Then draft with it:  [green]forerun generate --drafter retrieval --drafter-option store=code.store "def main"[/]
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name one with text files")
    check_writable(out)
    start = time.perf_counter()
    with loading(f"Looking for {model}") as told:
        from forerun.drafters.datastore import build as build_store

        tokenizer = _tokenizer(model, told)
        reading = Reading()
        files = sorted(find_files(folder, glob or ["*"]))
        if not files:
            raise ValueError(f"{folder} has no files named {' or '.join(glob or ['*'])}: name another folder or --glob")
        header = build_store(
            out,
            documents(files, tokenizer, reading, limit_tokens, told),
            vocabulary=1 + max(tokenizer.vocab.values()),
            fingerprint=tokenizer.fingerprint,
            model=model,
            progress=told,
        )
    seconds = time.perf_counter() - start
    count, size = header.tokens - header.documents, out.stat().st_size
    if as_json:
        answer = {"store": str(out), "tokens": count, "bytes": size, "seconds": seconds, "files": asdict(reading)}
        typer.echo(json.dumps(answer, indent=2))
        return
    ended = f", stopped at {limit_tokens:,} tokens" if reading.cut else ""
    line = f" is ready: {count:,} tokens of {header.documents:,} files, {_size(size)}, in {seconds:.0f} s"
    output().print(Text.assemble((str(out), "bold cyan"), line, reading.skipped, ended), soft_wrap=True)


@datastore.command()
def info(
    file: Annotated[Path, typer.Argument(help="A datastore.", show_default=False)], *, as_json: Json = False
) -> None:
    """What a datastore holds, and whether it is whole: all of it is read.

    [bold]Example[/]

    What is it?  [green]forerun datastore info code.store[/]
    """
    from forerun.drafters.datastore import Datastore

    store = Datastore.open(file)
    if not store.intact():
        raise ValueError(f"the datastore {file} is damaged: build it again with `forerun datastore build`")
    header = store.header
    answer = {
        "store": str(file),
        "model": header.model,
        "fingerprint": header.fingerprint,
        "vocabulary": header.vocabulary,
        "documents": header.documents,
        "tokens": header.tokens - header.documents,
        "sorted_by": header.depth,
        "bytes": file.stat().st_size,
    }
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in answer.items():
        table.add_row(name.replace("_", " "), Text(f"{value:,}" if isinstance(value, int) else str(value)))
    output().print(table)


def find_files(folder: Path, patterns: list[str]) -> Iterator[Path]:
    """Files with such names; what is hidden is left out, and links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and any(fnmatchcase(name, each) for each in patterns) and path.is_file():
                yield path


def documents(
    files: list[Path], tokenizer: Tokenizer, reading: Reading, limit: int | None, progress: Progress
) -> Iterator[list[int]]:
    """The tokens of each file that is text; `reading` is told about the others."""
    sizes = [path.stat().st_size for path in files]
    total, done, left = sum(sizes), 0, limit
    for path, size in zip(files, sizes, strict=True):
        if left == 0:
            reading.cut = True
            return
        text = _text(path, reading)
        tokens: list[int] = []
        seen = 0
        for piece in pieces(text or ""):
            progress("Tokenizing", done + min(seen, size), total)
            tokens += tokenizer.encode(piece, special=False)
            seen += len(piece)
            if left is not None and len(tokens) > left:
                tokens, reading.cut = tokens[:left], True
                break
        done += size
        progress("Tokenizing", done, total)
        left = None if left is None else left - len(tokens)
        yield tokens


def pieces(text: str) -> Iterator[str]:
    """Of at most `PIECE` characters, with whole lines where lines are not longer."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _text(path: Path, reading: Reading) -> str | None:
    """None for what is not text."""
    try:
        content = path.read_bytes()
    except OSError:
        reading.unreadable += 1
        return None
    if b"\0" in content:
        reading.binary += 1
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        reading.undecodable += 1
        return None
    reading.read += 1
    return text


def _tokenizer(model: str, progress: Progress) -> Tokenizer:
    from forerun.models.load import load_tokenizer, resolve
    from forerun.models.precision import parse_dtype

    return load_tokenizer(resolve(model, dtype=parse_dtype("auto"), progress=progress))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"
