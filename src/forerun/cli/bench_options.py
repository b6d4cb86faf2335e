"""What `forerun bench` compares, read from its options and checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from forerun.bench.cases import PLAIN, Case, Setting, cases, settings, shown
from forerun.cli.simulate import parse_list

STRONGEST, OWN = "strongest", "own"
"""Words for what a method takes where nothing is said."""
WHO_CHOOSES = {"off": (False,), "on": (True,), "both": (False, True)}
"""Whether the engine chooses how much is drafted."""
MOST_AT_ONCE = 4096
"""Texts of a batch: the cache and a step hold a place for each."""


@dataclass(frozen=True)
class Grid:
    cases: list[Case]
    settings: list[Setting]
    given: dict[str, str]
    """Drafters by the names they have in results, as they were given: a folder's path is no part of a result."""
    peers: list[str]
    options: dict[str, dict[str, str]]
    """Of drafters and peers."""
    rules: list[str]
    trees: list[str]
    adaptive: str
    """off, on, or both"""

    @classmethod
    def read(
        cls,
        drafters: str,
        peers: str | None,
        drafter_option: list[str],
        rules: str,
        trees: str,
        batch: str,
        temperatures: str,
        arrivals: str | None,
        adaptive: str = "off",
    ) -> Grid:
        from forerun.bench.peers import PEERS

        others = list(PEERS) if peers == "all" else _names(peers or "")
        given: dict[str, str] = {}
        for name in dict.fromkeys([*_names(drafters), *others]):
            if given.setdefault(shown(name), name) != name:
                raise ValueError(f"{name} and {given[shown(name)]} have the same name: rename one of the folders")
        for name in others:
            if name not in PEERS:
                raise ValueError(f"there is no peer {name!r}: use one of {', '.join(PEERS)}")
        given = given if PLAIN in given else {PLAIN: PLAIN, **given}
        options = _options(given, drafter_option)
        asked, shapes = _rules(rules), _trees(trees)
        if adaptive not in WHO_CHOOSES:
            raise ValueError(f"--adaptive is {adaptive!r}: give off, on, or both to have them side by side")

        def choices(name: str) -> tuple[bool, bool]:
            return name not in PEERS, name not in PEERS and _has_tree(given[name])

        rates = [] if arrivals is None else parse_list("--arrivals", arrivals, float)
        batches = parse_list("--batch", batch, int)
        if min(batches) < 1 or max(batches) > MOST_AT_ONCE:
            raise ValueError(f"--batch is {batch!r}: it must be at least 1, and at most {MOST_AT_ONCE}")
        heats = parse_list("--temperatures", temperatures, float)
        if not all(0 <= heat < 100 for heat in heats):
            raise ValueError(f"--temperatures is {temperatures!r}: give numbers of 0 (greedy) or more")
        conditions = settings(batches, heats, rates)
        named = [name for name in given if name in PEERS]
        methods = cases(given, asked, shapes, choices, WHO_CHOOSES[adaptive])
        return cls(methods, conditions, given, named, options, asked, shapes, adaptive)

    def is_peer(self, case: Case) -> bool:
        return case.drafter in self.peers

    def arguments(self) -> dict[str, Any]:
        """For the provenance."""
        return {
            "drafters": list(self.given),
            "options": {name: {key: shown(value) for key, value in own.items()} for name, own in self.options.items()},
            "rules": self.rules,
            "trees": self.trees,
            "adaptive": self.adaptive,
            "batch": list(dict.fromkeys(setting.batch for setting in self.settings)),
            "temperatures": list(dict.fromkeys(setting.temperature for setting in self.settings)),
            "arrivals": list(dict.fromkeys(each.arrivals for each in self.settings if each.arrivals is not None)),
        }


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rules(text: str) -> list[str]:
    from forerun.verify.rule import all_rules

    names = _names(text) or [STRONGEST]
    for name in names:
        if name != STRONGEST and name not in all_rules():
            raise ValueError(f"there is no verification rule {name!r}: use strongest, {', '.join(all_rules())}")
    return ["" if name == STRONGEST else name for name in names]


def _trees(text: str) -> list[str]:
    from forerun.drafters.tree_spec import TreeSpec

    shapes = [shape.strip() for shape in text.split(";") if shape.strip()] or [OWN]
    for shape in shapes:
        if shape != OWN:
            TreeSpec.parse(shape)
    return ["" if shape == OWN else shape for shape in shapes]


def _has_tree(drafter: str) -> bool:
    from forerun.drafters.find import resolve

    module = import_module(f"forerun.drafters.{resolve(drafter)[0]}")
    return any(field.name == "tree" for field in fields(module.Options))


def _options(given: dict[str, str], texts: list[str]) -> dict[str, dict[str, str]]:
    from forerun.bench.peers import OPTIONS, PEERS
    from forerun.drafters.find import read_options

    options: dict[str, dict[str, str]] = {name: {} for name in given}
    for text in texts:
        key, equals, value = text.partition("=")
        drafter, dot, option = key.rpartition(".")
        if not (equals and dot and option):
            raise ValueError(f"--drafter-option is {text!r}: write it as DRAFTER.KEY=VALUE")
        drafter = shown(drafter)
        if drafter not in options:
            raise ValueError(f"--drafter-option names {drafter!r}, which is not among --drafters {','.join(given)}")
        if drafter in PEERS and option not in OPTIONS.get(drafter, ()):
            raise ValueError(f"the peer {drafter} has no option {option!r}")
        options[drafter][option] = value
    for name, own in options.items():
        if name not in PEERS:
            read_options(given[name], own)
    return options
