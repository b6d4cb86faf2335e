"""`forerun serve`: the model behind an OpenAI-compatible endpoint, and a page to watch it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.model_options import ModelOptions, takes

LIMITS = "Limits"
DOORS = "Who may come in"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@takes(model=ModelOptions)
def serve(
    *,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 for any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="the last part of --model")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter that a request may name besides --drafter; may be given again.",
            show_default="ngram, suffix, recycling, lookahead",
        ),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--fixed", help="Draft as much as has paid so far, or always the whole tree.")
    ] = True,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Do not read again what an earlier text left in the cache.")
    ] = True,
    max_batch: Annotated[int, typer.Option(help="Texts written at a time.", min=1, rich_help_panel=LIMITS)] = 16,
    cache_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that a cache holds.", show_default="what fits", min=16, rich_help_panel=LIMITS),
    ] = None,
    queue: Annotated[
        int, typer.Option(help="Texts that may wait; then 429 is answered.", min=0, rich_help_panel=LIMITS)
    ] = 64,
    max_prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt.", show_default="what the context holds", min=1, rich_help_panel=LIMITS),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a text.", show_default="what the context holds", min=1, rich_help_panel=LIMITS),
    ] = None,
    max_texts: Annotated[
        int, typer.Option(help="Texts of a request: prompts times n.", min=1, rich_help_panel=LIMITS)
    ] = 16,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", min=1, rich_help_panel=LIMITS)] = 4 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.", min=1, rich_help_panel=LIMITS)] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds to finish texts in after SIGTERM.", min=0, rich_help_panel=LIMITS)
    ] = 30.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of API keys, one a line.", rich_help_panel=DOORS)
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            help="A web origin whose pages may ask; may be given again.", metavar="ORIGIN", rich_help_panel=DOORS
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; JSON lines on stderr.")] = "info",
    model: ModelOptions,
) -> None:
    """Serve the model as OpenAI does: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    The page at / shows how it writes. Texts run together in one batch, with drafts or without, as each request likes:
    {"speculation": {"drafter": "suffix", "length": 8}} or {"speculation": {"off": true}}.

    SIGTERM ends it when the texts that are being written are done.

    [bold]Examples[/]

    On this machine:  [green]forerun serve --drafter suffix[/]

    For others, with keys:  [green]forerun serve --host 0.0.0.0 --api-key-file keys.txt[/]

    [green]curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "smollm2-135m",
    "prompt": "The sky is", "max_tokens": 20}'[/]
    """
    missing = [each for each in NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: install it with `pip install forerun[serve]`")
    if log_level not in {"debug", "info", "warning", "error"}:
        raise ValueError(f"--log-level is {log_level!r}: use debug, info, warning or error")
    from forerun.serve.keys import Keys, read_keys

    keys = Keys([] if api_key_file is None else read_keys(api_key_file))
    from forerun.core.collector import heap_stays
    from forerun.serve.app import Doors
    from forerun.serve.limits import Limits
    from forerun.serve.logs import log_to_stderr
    from forerun.serve.server import FREE, Settings, bind, open_service, serve, shown_name

    settings = Settings(
        name=name or shown_name(model.model),
        drafter=model.drafter_name,
        drafter_options=model.read_drafter_options() | ({} if model.tree is None else {"tree": model.tree}),
        also=tuple(also) if also is not None else FREE,
        rule=model.rule,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
        adaptive=adaptive,
        reuse=reuse,
        limits=Limits(queue, max_prompt, max_tokens, max_texts, max_body, timeout),
        doors=Doors(keys, cors or []),
        grace=grace,
    )
    settings.check()
    with bind(host, port) as taken:
        loaded = model.load()
        log_to_stderr(log_level)
        with open_service(loaded, settings) as service, heap_stays():
            where = f"http://{f'[{host}]' if ':' in host else host}:{taken.getsockname()[1]}"
            console, said = Console(stderr=True, highlight=False), Text(f"{settings.name} is served at {where}")
            serve(service, settings, taken, ready=lambda: console.print(said))
