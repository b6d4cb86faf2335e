"""A certificate for every drafter that comes with Forerun, at temperatures 0, 0.7 and 1 with top-p.

    python -m benchmarks.certificates

Each is written to results/certificates/DRAFTER.json as soon as it is there. One that is there already, made with the
same options and the same sources, is kept, so an interrupted run is gone on with; --again makes it anew, and
`--drafters ngram,eagle3` makes only some. Five to seven minutes of a processor's time each: an hour for all.
Certificates that were refused or failed are written too, and the command then ends with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from forerun.bench.provenance import git_state
from forerun.cli.main import main as forerun
from forerun.drafters.find import Setup, make_drafter, names
from forerun.engine.loaded import LoadedModel

FOLDER = Path(__file__).parents[1] / "results" / "certificates"
MODEL = "smollm2-135m"
TEMPERATURES = [0.0, 0.7, 1.0]
OPTIONS = {"layer_skip": ["--drafter-option", "adaptive=false"]}
"""Of a drafter that would rather draft nothing on this model: then there would be nothing to test."""
SETTINGS = {"temperature": TEMPERATURES, "top_p": 0.95, "samples": 80, "contexts": 4, "length": 32, "seed": 0}


def shipped() -> list[str]:
    """Drafters that need neither an option nor a file that does not come with Forerun."""
    model = LoadedModel.load(MODEL)
    setup = Setup(model.target, 1024, model.load_beside, lambda: model.tokenizer.fingerprint, model.folder)
    found = []
    for name in names():
        try:
            make_drafter(name, setup)
        except ValueError:
            continue
        found.append(name)
    return [name for name in found if name != "none"]


def read(drafter: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"{drafter}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def is_current(found: dict[str, Any] | None, commit: str | None) -> bool:
    """Whether a certificate is one of these, made with these sources."""
    if found is None or found.get("model") != MODEL:
        return False
    origin = found["provenance"]
    same = all(origin["arguments"].get(key) == value for key, value in SETTINGS.items())
    return same and origin["git"] == {"commit": commit, "dirty": False}


def certify(drafter: str) -> int:
    """The exit code of `forerun certify`."""
    options = {key: value for key, value in SETTINGS.items() if key != "temperature"}
    told = OPTIONS.get(drafter, []) + [
        text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))
    ]
    heats = ",".join(f"{heat:g}" for heat in TEMPERATURES)
    out = str(FOLDER / f"{drafter}.json")
    try:
        forerun(["certify", "--model", MODEL, "--drafter", drafter, "--temperature", heats, *told, "--out", out])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    raise AssertionError("the command always ends in SystemExit")


def table(folder: Path = FOLDER) -> str:
    """A line for each certificate: what was compared, the smallest p-value of all tests of the law, and by what p-value
    they see a broken rule, where they see it worst; and those that do not see it at some temperature."""
    seen = "an error that would be seen"
    columns = (
        "greedy",
        "seeded",
        "law, smallest p",
        f"{seen}, of all places",
        f"{seen}, of one",
        "broken rule, p",
        "not seen by",
    )
    lines = ["| drafter | verdict | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * len(columns)]
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit("results/certificates has no certificate: make them with python -m benchmarks.certificates")
    made: dict[tuple[str, str], list[str]] = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        lines.append("| " + " | ".join([found["drafter"], *_cells(found)]) + " |")
        origin = found["provenance"]
        made.setdefault((origin["git"]["commit"][:9], origin["time"][:10]), []).append(found["drafter"])
    notes = [f"<sub>commit {commit}, {day}: {', '.join(own)}</sub>" for (commit, day), own in made.items()]
    return "\n".join([*lines, "", *notes])


def _cells(found: dict[str, Any]) -> list[str]:
    findings = found["findings"]
    laws = [each for each in findings if "p_value" in each["figures"]]
    visible = [each["figures"]["visible_error"] for each in laws if each["test"] in {"all places", "drafts"}]
    at_one = [each["figures"]["visible_error"] for each in laws if each["test"] == "next tokens"]
    controls: dict[float, list[float]] = {}
    for each in laws:
        if each["figures"]["control"]:
            controls.setdefault(each["temperature"], []).append(each["figures"]["control"]["p_value"])
    return [
        found["verdict"],
        _identical(findings, "greedy"),
        _identical(findings, "seeded"),
        f"{min(each['figures']['p_value'] for each in laws):.2g}" if laws else "",
        f"{max(visible):.1%}" if visible else "",
        f"{max(at_one):.0%}" if at_one else "",
        _briefly(max(map(min, controls.values()))) if controls else "",
        ", ".join(dict.fromkeys(each["test"] for each in findings if each["control_failed"] is False)),
    ]


def _briefly(p_value: float) -> str:
    return f"{p_value:.1g}" if p_value > 1e-9 else "< 1e-9"


def _identical(findings: list[dict[str, Any]], test: str) -> str:
    own = [each["figures"] for each in findings if each["test"] == test]
    texts = sum(each["texts"] for each in own)
    ties = sum(parting["tie"] for each in own for parting in each["partings"])
    same = texts - sum(len(each["partings"]) for each in own)
    return f"{same}/{texts}" + (f" ({ties} tie{'s' * (ties > 1)})" if ties else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", help="some, with commas; by default all that come with Forerun")
    parser.add_argument("--again", action="store_true", help="make also those that are there")
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    drafters = asked.drafters.split(",") if asked.drafters else shipped()
    commit = (git_state() or {}).get("commit")
    failed = []
    for place, drafter in enumerate(drafters, 1):
        found = read(drafter)
        if is_current(found, commit) and not asked.again:
            assert found is not None
            print(f"{place}/{len(drafters)} {drafter}: {found['verdict']}, kept", flush=True)
            failed += [drafter] if found["verdict"] != "certified" else []
            continue
        print(f"{place}/{len(drafters)} {drafter}: some minutes", flush=True)
        start = time.perf_counter()
        if certify(drafter):
            failed.append(drafter)
        print(f"{drafter}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"without a certificate: {', '.join(failed)}")


if __name__ == "__main__":
    main()
