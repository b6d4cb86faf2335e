"""The entry point: which commands there are, and what a user sees when something is wrong.

A command raises `ValueError` for what a user can get wrong, and lets `OSError` pass. Both become one sentence
on stderr and exit code 1, and so does memory that ran out; the options themselves are checked by typer, with
exit code 2. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import forerun
from forerun.cli.bench import bench
from forerun.cli.calibrate import calibrate
from forerun.cli.calibrate_trained import trained
from forerun.cli.certify import certify
from forerun.cli.chat import chat
from forerun.cli.datastore import datastore
from forerun.cli.demo import demo
from forerun.cli.generate import generate
from forerun.cli.models import models
from forerun.cli.plan import plan
from forerun.cli.rules import rules
from forerun.cli.serve import serve
from forerun.cli.simulate import simulate
from forerun.cli.train import train
from forerun.core.shortage import ran_out_of_memory, shortage

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SMALLER = {
    "bench": "lower --batch or --max-tokens, or take a smaller --model",
    "plan": "lower --concurrency or --max-tokens, or take a smaller --target",
    "certify": "lower --length, give shorter --prompts, or take a smaller --model",
    "serve": "lower --cache-tokens, or take a smaller --model",
    "train": "lower --batch or --batch-tokens, or take a smaller --target",
}
"""What to do where memory ran out."""

app = typer.Typer(
    name="forerun",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# A new command is one line here; its docstring is its help. `models`, `datastore` and `calibrate` have their own.
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(bench)
app.command()(certify)
app.add_typer(models, name="models")
app.add_typer(datastore, name="datastore")
calibrate.command()(trained)
app.add_typer(calibrate, name="calibrate")
app.command()(train)
app.command()(simulate)
app.command()(plan)
app.command()(rules)
app.command()(demo)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"forerun {forerun.__version__}")
        raise typer.Exit


@app.callback()
def forerun_command(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Language models that write faster without writing anything else."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in `SystemExit`."""
    # Read when PyTorch is loaded, which is later. Threads that spin while they wait gain nothing here, and on a machine
    # that is busy otherwise they cost a third and more (docs/log.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.stdout is None:  # closed, as by `>&-`: nothing could be said, so nothing is done
        _complain("there is no standard output: leave it open, or send it to /dev/null")
        raise SystemExit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ■ shows ?, and goes on
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`forerun ... | head`). Python would complain once more when it flushes at exit.
        _drop_output()
        code = 1
    except OSError as error:
        _complain(f"cannot write standard output: {error.strerror or error}")
        _drop_output()
        code = 1
    raise SystemExit(code)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        app(args=arguments, prog_name="forerun")
    except SystemExit as stop:  # typer's own way to end, also after Ctrl-C (130) and usage errors (2)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:  # not about a file that was named: printing failed
            raise
        doing = "write" if error.errno in FULL else "open"
        _complain(f"cannot {doing} {error.filename}: {error.strerror or error}")
        return 1
    except ValueError as error:
        _complain(str(error))
        return 1
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        given = sys.argv[1:] if arguments is None else arguments
        _complain(f"{shortage(error)}: {SMALLER.get(next(iter(given), ''), 'take a smaller model, or a shorter text')}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    """One line on stderr; as `Text`, so that brackets in the message are not read as markup.

    What a terminal would obey, such as an escape sequence in a file's name, is spelled out.
    """
    line = " ".join(f"forerun: {message}".split())
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    Console(stderr=True, soft_wrap=True).print(Text(line, style="red"))


if __name__ == "__main__":
    main()
