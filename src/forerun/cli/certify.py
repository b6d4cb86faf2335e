"""`forerun certify`: does this drafter write the model's own text, here and now? With the power of the tests, and with
a broken rule as their control."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.bench.cases import shown
from forerun.cli.console import output, print_whole, working
from forerun.cli.files import check_writable, write_whole
from forerun.cli.model_options import ModelOptions, loading, takes
from forerun.cli.simulate import parse_list

if TYPE_CHECKING:  # torch is loaded when a command needs it, not when the program starts
    from forerun.certify.certificate import Certificate, Plan
    from forerun.certify.findings import Finding
    from forerun.engine.loaded import LoadedModel

WORDS = {
    "certified": ("CERTIFIED", "bold green"),
    "failed": ("FAILED", "bold red"),
    "refused": ("REFUSED", "bold red"),
    "lossy": ("LOSSY", "bold yellow"),
}
WHERE = {
    "next tokens": "at the beginning that most texts share",
    "together": "at every shared beginning",
    "drafts": "between drafted and other tokens",
    "all places": "between likelier and less likely tokens, over all places,",
}
SHOWN = 12
"""Differences that are told one by one."""


@takes(model=ModelOptions)
def certify(
    *,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.7,1",
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens with this much probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens of prompt and text.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0: against tokens that the text has.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0: the same, for each time.")] = 0.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with turns, or plain text, a prompt on each line.", show_default="12 of our own"),
    ] = None,
    contexts: Annotated[int, typer.Option(help="Places at which the law of what follows is tested.")] = 4,
    samples: Annotated[int, typer.Option(help="Texts written at each of them; more see smaller errors.")] = 80,
    length: Annotated[int, typer.Option(help="Tokens of each of these texts.")] = 32,
    original: Annotated[
        str | None,
        typer.Option(help="The distance to this model instead: of a Medusa-2 backbone, the one it was made from."),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--fixed", help="Draft as much as has paid so far, or always the whole tree.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed repeats the tests; another one draws new texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the certificate to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    model: ModelOptions,
) -> None:
    """Certify that a drafter leaves the model's text as it is, on this machine, and say how small an error would have
    been seen.

    At temperature 0, and with seeds, drafted text is compared with plain text, token for token; of a difference the gap
    between the logits is told, and whether rounding explains it. Sampled text is tested against the model's exact
    probabilities and against plainly sampled text; p-values are corrected for all tests together. The tests are
    done again with a rule that is broken on purpose. Where none of a kind, identity or law, sees that at some
    temperature there is no certificate; the verdict names single tests that did not.

    Exit code 0: certified. 1: not, and why. A lossy rule gets a distance, and no certificate.

    [bold]Examples[/]

    A drafter:  [green]forerun certify --drafter ngram[/]

    A rule, a tree, a precision:  [green]forerun certify --drafter eagle3 --tree 3,2 --rule traversal --dtype float32[/]

    Smaller errors, and a file:  [green]forerun certify --drafter recycling --samples 1000 --out certificate.json[/]

    As a server drafts, by what has paid:  [green]forerun certify --drafter eagle3 --adaptive[/]

    How far typical acceptance is off:  [green]forerun certify --drafter medusa --rule typical --temperature 1[/]
    """
    if out is not None:
        check_writable(out)
    if model.drafter_name == "none":
        raise ValueError("nothing is drafted, so there is nothing to certify: name a drafter with --drafter")
    truncation = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    penalties = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    temperatures = parse_list("--temperature", temperature, float)
    sizes = {"contexts": contexts, "samples": samples, "length": length, "seed": seed}
    plan = _plan(temperatures, truncation | penalties, sizes)
    asked = _prompts(prompts)
    _check_names(model)
    with loading(f"Loading {model.model}") as told:
        from forerun.bench.provenance import provenance

        loaded = _load(model, told)
        other = None if original is None else _load(model, told, original)
        weights = _weights(loaded, other, model)
    certificate, dtype, rules = _certify(loaded, other, model, asked, plan, adaptive=adaptive)
    arguments = {"temperature": temperatures, **truncation, **penalties, **sizes, "prompts": len(asked)}
    options = {key: shown(str(value)) for key, value in model.read_drafter_options().items()}
    subject: dict[str, Any] = {
        "model": shown(model.model),
        "drafter": shown(model.drafter_name),
        "options": options | {"tree": model.tree},
        "rule": model.rule or "strongest",
        "rules": rules,
        "adaptive": adaptive,
        "dtype": dtype,
        "original": None if original is None else shown(original),
        "made_from": _made_from(loaded.folder),
        "weights": weights,
    }
    device = str(loaded.target.device)
    answer = {**subject, **certificate.as_dict(), "provenance": provenance(arguments, device)}
    text = json.dumps(answer, indent=1, allow_nan=False)
    if out is not None:
        write_whole(out, f"{text}\n".encode())
    if as_json:
        typer.echo(text)
    else:
        console = output()
        drafts = f"{model.drafter_name}{', adaptive' if adaptive else ''}"
        console.print(Text(f"{model.model}, {drafts}, {subject['rule']} rule, {dtype} on {device}"))
        digests = [f"{name} {digest[:8]}" for name, digest in weights.items() if name != "identity" and digest]
        console.print(Text(f"weights: {', '.join(digests)}", style="dim"))
        show(console, certificate, loaded)
        if original is None and subject["made_from"]:
            words = f"This is the text of {model.model}, not of {subject['made_from']}, which it was made from: "
            console.print(Text(f"{words}--original {subject['made_from']} measures how far the two are apart."))
        if out is not None:
            console.print(Text.assemble("Written: ", (str(out), "bold cyan")))
    if certificate.verdict != "certified":
        raise typer.Exit(1)


def _plan(temperatures: list[float], settings: dict[str, Any], sizes: dict[str, int]) -> Plan:
    from forerun.certify.certificate import Plan
    from forerun.core.params import SamplingParams

    each = [SamplingParams(temperature=value, **settings) for value in dict.fromkeys(temperatures)]
    return Plan(tuple(each), **sizes)


def _made_from(folder: Path | None) -> str | None:
    """The model whose layers went on learning, as Medusa-2 has it, for this one."""
    from forerun.models.fields import read_json
    from forerun.models.store import MANIFEST

    try:
        found = read_json(folder / MANIFEST)["original"]["name"] if folder else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _prompts(file: Path | None) -> list[str]:
    from forerun.certify.prompts import PROMPTS
    from forerun.train.prompts import read_prompts

    return list(PROMPTS) if file is None else [prompt.turns[0] for prompt in read_prompts(file)]


def _check_names(model: ModelOptions) -> None:
    """Before a model is loaded."""
    from forerun.drafters.find import read_options
    from forerun.verify.rule import all_rules

    tree = {} if model.tree is None else {"tree": model.tree}
    read_options(model.drafter_name, model.read_drafter_options() | tree)
    if model.rule is not None and model.rule not in all_rules():
        raise ValueError(f"there is no verification rule {model.rule!r}: use one of {', '.join(all_rules())}")


def _load(model: ModelOptions, told: Any, name: str | None = None) -> LoadedModel:
    from forerun.engine.loaded import LoadedModel

    return LoadedModel.load(
        name or model.model,
        dtype=model.dtype,
        device=model.device,
        revision=None if name else model.revision,
        offline=model.offline,
        progress=told,
    )


def _weights(loaded: LoadedModel, other: LoadedModel | None, model: ModelOptions) -> dict[str, str | None]:
    """Digests of the files; the identity is the same in every number format, and what drafters name their target by."""
    from forerun.engine.weights import drafter_digest, model_digest
    from forerun.models.identity import weights_identity
    from forerun.models.transformer import Transformer

    target = loaded.target
    return {
        "identity": weights_identity(target) if isinstance(target, Transformer) else None,
        "model": model_digest(loaded),
        "original": None if other is None else model_digest(other),
        "drafter": drafter_digest(model.drafter_name, model.read_drafter_options(), target),
    }


def _certify(
    loaded: LoadedModel, other: LoadedModel | None, model: ModelOptions, asked: list[str], plan: Plan, *, adaptive: bool
) -> tuple[Certificate, str, dict[str, str]]:
    """With the precision, and by temperature the rule that judges texts without a seed."""
    from dataclasses import replace

    from forerun.certify import certificate, subject
    from forerun.certify.contexts import ANSWER
    from forerun.drafters.find import Setup, make_drafter
    from forerun.engine.controller import Controller
    from forerun.engine.loaded import precision_of
    from forerun.engine.prompts import to_tokens

    target, tokenizer = loaded.target, loaded.tokenizer
    if other is not None and other.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError("--original has another tokenizer than --model: name the model that it was made from")
    ends = tuple(sorted(tokenizer.eos - target.eos))  # the end of a turn, where the model does not call it so
    plan = replace(plan, settings=tuple(replace(params, stop_token_ids=ends) for params in plan.settings))
    tokens = [to_tokens(prompt, tokenizer, chat=None) for prompt in asked]
    longest = max(plan.answer, plan.length + ANSWER)
    subject.refuse_misfits([target, *([] if other is None else [other.target])], tokens, longest)
    slots = subject.slots_for(tokens, longest)
    setup = Setup(target, slots, loaded.load_beside, lambda: tokenizer.fingerprint, loaded.folder, adaptive)
    options = model.read_drafter_options() | ({} if model.tree is None else {"tree": model.tree})
    drafter = make_drafter(model.drafter_name, setup, options)
    original = None if other is None else other.target
    controller = Controller() if adaptive else None
    certified = subject.Subject(target, drafter, rule=model.rule, slots=slots, original=original, controller=controller)
    with working() as told:
        try:
            found = certificate.certify(certified, tokens, plan, told)
        except certificate.BrokeDownError as error:
            raise ValueError(f"no certificate: {error}") from error
    rules = {f"{params.temperature:g}": certified.rule_for(params).name for params in plan.settings}
    return found, precision_of(target), rules


# --- telling ------------------------------------------------------------------------------------------------------


def show(console: Console, certificate: Certificate, loaded: LoadedModel) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
    table.add_column("T", justify="right")
    for title in ("test", "compared", "result", "broken rule"):
        table.add_column(title, no_wrap=True)
    for each in certificate.findings:
        sign = Text("✓ " if each.passed else "✗ ", style="green" if each.passed else "bold red")
        seen = Text(each.control or "", style="" if each.control_failed else "yellow")
        table.add_row(
            f"{each.temperature:g}", each.test, each.compared, sign.append(each.result, style="default"), seen
        )
    print_whole(console, table)
    for line in [*_power(certificate), *_differences(certificate, loaded)]:
        console.print(Text(line, style="dim"))
    word, style = WORDS[certificate.verdict]
    console.print(Text.assemble((word, style), f": {certificate.reason}."))


def _power(certificate: Certificate) -> list[str]:
    lines = []
    for each in certificate.findings:
        visible = each.figures.get("visible_error")
        if visible is not None:
            where, counted = WHERE[each.test], "steps" if each.test == "drafts" else "tokens"
            lines.append(
                f"T {each.temperature:g}, {each.test}: an error of {visible:.1%} total variation {where} would be seen "
                f"with a chance of 95%; one of 1% would take {each.figures['samples_for_error']:,} {counted}."
            )
    return lines


def _differences(certificate: Certificate, loaded: LoadedModel) -> list[str]:
    lines = []
    for each in certificate.findings:
        partings = each.figures.get("partings", []) + each.figures.get("forbidden", [])
        lines += [_difference(each, parting, loaded) for parting in partings[:SHOWN]]
        if len(partings) > SHOWN:
            lines.append(f"T {each.temperature:g}, {each.test}: and {len(partings) - SHOWN} more.")
    return lines


def _difference(finding: Finding, parting: dict[str, Any], loaded: LoadedModel) -> str:
    def word(token: int | None) -> str:
        return "the end" if token is None else repr(loaded.tokenizer.decode([token]))

    where = f"T {finding.temperature:g}, {finding.test}, text {parting['text'] + 1}, token {parting['place'] + 1}"
    if finding.test in {"greedy", "seeded"}:
        what = f"{word(parting['plain'])} plainly, {word(parting['drafted'])} with drafts"
    else:
        what = f"{word(parting['drafted'])} has probability 0"
    if parting["gap"] is None:
        return f"{where}: {what}."
    verdict = "a tie" if parting["tie"] else "a failure"
    return (
        f"{where}: {what}; logits {parting['gap']:.2g} apart, rounding explains {parting['rounding']:.2g}: {verdict}."
    )
