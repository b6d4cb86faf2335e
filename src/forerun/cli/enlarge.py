"""`forerun models enlarge`: a model at the cost of a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.cli.console import output
from forerun.cli.model_options import loading

if TYPE_CHECKING:
    from forerun.models.checkpoint import Progress
    from forerun.models.heads.files import HeadFolder
    from forerun.models.load import Source


def enlarge(
    model: Annotated[str, typer.Argument(help="A built-in name, a folder, a GGUF file or a Hugging Face id.")],
    *,
    like: Annotated[
        str, typer.Option(help="llama-3-1b, llama-3-8b, or a folder with a config.json.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder to make; it must not exist yet.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the weights that fill the room and change nothing.", min=0)] = 0,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.", show_default=False)
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter for the model, such as eagle3 or a folder, to enlarge as well; may be repeated.",
            show_default=False,
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Make a model of a larger shape that writes what a small one writes, to time real text at that size.

    The small model's weights are placed inside the larger shape, so that it computes the same function: the same text
    and the same drafts accepted, at the cost of the larger model. What is left of the room holds random weights that
    reach nothing. The vocabulary stays the small model's, so that its tokenizer and its drafters fit. If the shape has
    fewer layers than the model, the model's number is taken, and a narrower MLP: as many weights as in the shape.

    Drafters that read the model's states were trained for its width. With [bold]--drafter[/] they are enlarged too, to
    draft the same at the cost of a drafter for the larger model; they are put into the folder drafters beside it.

    [bold]Examples[/]

    At the cost of Llama-3-8B, 14.4 GB:  [green]forerun models enlarge smollm2-135m --like llama-3-8b --out big[/]

    Then:  [green]forerun generate --model big "Why is the sky blue?"[/]

    With a drafter:  [green]forerun models enlarge smollm2-135m --like llama-3-8b --out big --drafter eagle3[/]

    Then:  [green]forerun generate --model big --drafter big/drafters/eagle3 "Why is the sky blue?"[/]
    """
    with loading(f"Looking for {model}") as report:
        import torch

        from forerun.models.enlarge_folder import enlarge_folder, find_shape
        from forerun.models.load import resolve
        from forerun.models.precision import parse_dtype

        chosen, shape = parse_dtype(dtype), find_shape(like)
        # from float32, so that what is scaled is rounded once
        source = resolve(model, dtype=torch.float32, revision=revision, offline=offline, progress=report)
        heads = _find_drafters(drafter or [], source)  # before gigabytes are written
        made = enlarge_folder(source, shape, out, dtype=chosen, seed=seed, progress=report)
        drafters = _enlarge_drafters(heads, source, made.folder, seed, report)
    config = made.config
    if as_json:
        sizes = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "layers": len(config.layers),
            "vocab_size": config.vocab_size,
        }
        answer = {"name": model, "like": like, "folder": str(made.folder), "weights": made.weights, "bytes": made.bytes}
        answer["drafters"] = {name: str(folder) for name, folder in drafters.items()}
        typer.echo(json.dumps({**answer, **sizes}, indent=2))
        return
    ready = Text.assemble(
        (str(made.folder), "bold cyan"),
        f" writes what {model} writes, with {made.weights / 1e9:.2f} billion weights ({made.bytes / 1e9:.1f} GB): "
        f"{len(config.layers)} layers {config.hidden_size} wide, {config.heads} heads of {config.head_dim}, an MLP of "
        f"{config.intermediate_size}, and the vocabulary of {config.vocab_size:,} as before.",
    )
    output().print(ready, soft_wrap=True)
    if len(config.layers) != shape.layers:
        layers = "1 layer" if shape.layers == 1 else f"{shape.layers} layers"
        why = f"{like} has {layers} with an MLP of {shape.intermediate_size}: about as many weights in each pass."
        output().print(Text(why, style="dim"), soft_wrap=True)
    for name, folder in drafters.items():
        ready = Text.assemble((str(folder), "bold cyan"), f" drafts for it what {name} drafts for {model}.")
        output().print(ready, soft_wrap=True)


def _find_drafters(names: list[str], source: Source) -> dict[str, HeadFolder]:
    """Those that were named, by the names of the folders they will have."""
    from forerun.drafters.find import Setup, read_options, resolve
    from forerun.drafters.trained_folder import find_head
    from forerun.models.heads.enlarge_head import check_method
    from forerun.models.identity import outline

    if not names or source.config is None:
        return {}
    small = outline(source.folder, source.config)
    setup = Setup(small, 0, lambda name: small, folder=source.folder)
    found: dict[str, HeadFolder] = {}
    for name in names:
        read_options(name)  # refuses a name that is none
        method, options = resolve(name)
        check_method(method)
        called = Path(name).expanduser().resolve().name
        if called in found:
            raise ValueError(f"two drafters are called {called}: rename the folder of one of them")
        found[called] = find_head(method, options.get("path", ""), setup)[0]
    return found


def _enlarge_drafters(
    heads: dict[str, HeadFolder], source: Source, out: Path, seed: int, report: Progress
) -> dict[str, Path]:
    """Into the folder of the enlarged model, which is known by what is in its files."""
    import torch

    from forerun.models.heads.enlarge_head import enlarge_head
    from forerun.models.heads.files import write_head
    from forerun.models.identity import outline
    from forerun.models.load import resolve

    if not heads:
        return {}
    config = resolve(str(out), dtype=torch.float32).config
    assert source.config is not None
    assert config is not None
    large = outline(out, config)
    folders = {name: out / "drafters" / name for name in heads}
    for done, (name, head) in enumerate(heads.items()):
        report(f"Enlarging {name}", done, 0)
        write_head(folders[name], enlarge_head(head, source.config, large, name=out.name, seed=seed))
    return folders
