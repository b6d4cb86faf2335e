"""What is compared: methods (a drafter with its rule and tree, or a peer) under settings that all of them meet alike.

The grid is drafters × rules × trees × who chooses how much is drafted, measured at batch sizes × temperatures ×
arrivals. A choice that a method does not have is not multiplied out: plain decoding and peers have neither rule nor
tree, some drafters have no tree to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

PLAIN = "none"
"""Plain decoding of our own engine: what every speedup is over."""
ADAPTIVE = "adaptive"
"""In the name of a method whose engine chooses how much is drafted."""


@dataclass(frozen=True)
class Case:
    """A method; an empty rule is the strongest one, an empty tree the drafter's own."""

    drafter: str
    """A name, never a path: results must not tell where things lie."""
    rule: str = ""
    tree: str = ""
    adaptive: bool = False
    """Whether the engine chooses how much is drafted, by what has paid so far, instead of the whole tree."""

    @property
    def label(self) -> str:
        chosen = ADAPTIVE if self.adaptive else ""
        return " ".join(part for part in (self.drafter, self.tree, self.rule, chosen) if part)


@dataclass(frozen=True)
class Setting:
    """What all methods meet alike."""

    batch: int = 1
    temperature: float = 0.0
    arrivals: float | None = None
    """Requests a second, at random times; None for closed batches, where all wait at the door from the beginning."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"a batch of {self.batch}: it must be at least 1")
        if self.arrivals is not None and not 0 < self.arrivals < 1e6:
            raise ValueError(f"arrivals at a rate of {self.arrivals:g} a second: give a number above 0")

    @property
    def label(self) -> str:
        load = f"batch {self.batch}" if self.arrivals is None else f"{self.arrivals:g} arrivals/s, batch {self.batch}"
        return f"{load}, temperature {self.temperature:g}"

    @property
    def apart(self) -> bool:
        """Whether categories are measured one by one; larger batches would not be filled by one category."""
        return self.batch == 1 and self.arrivals is None


@dataclass(frozen=True)
class Place:
    """Of one measurement in the plan: a method, a setting, a round, and which questions."""

    case: Case
    setting: Setting
    round: int
    pool: str
    """A category, or `ALL`."""


ALL = "overall"


def cases(
    drafters: Iterable[str],
    rules: Sequence[str],
    trees: Sequence[str],
    choices: Callable[[str], tuple[bool, bool]],
    adaptive: Sequence[bool] = (False,),
) -> list[Case]:
    """Plain decoding is always among them. `choices` says of a drafter whether rules and trees can be chosen for it;
    one that has rules is one of ours, whose engine may choose how much is drafted."""
    found = []
    named = list(drafters)
    for drafter in named if PLAIN in named else [PLAIN, *named]:
        has_rules, has_trees = (False, False) if drafter == PLAIN else choices(drafter)
        grid = product(
            rules if has_rules else ("",), trees if has_trees else ("",), adaptive if has_rules else (False,)
        )
        found += [Case(drafter, *choice) for choice in grid]
    return list(dict.fromkeys(found))


def settings(batches: Sequence[int], temperatures: Sequence[float], arrivals: Sequence[float]) -> list[Setting]:
    """Closed batches, and behind them arrivals where rates are given."""
    closed = [Setting(batch, heat) for heat in temperatures for batch in batches]
    opened = [Setting(batch, heat, rate) for heat in temperatures for batch in batches for rate in arrivals]
    return list(dict.fromkeys([*closed, *opened]))


def plan(
    methods: Sequence[Case], conditions: Sequence[Setting], categories: Sequence[str], rounds: Callable[[Case], int]
) -> list[Place]:
    """Interleaved: in each round all methods go through a pool of questions before the next pool, and each round starts
    with another method."""
    places = []
    for setting in conditions:
        pools = categories if setting.apart else (ALL,)
        for number in range(max(map(rounds, methods), default=0)):
            playing = [case for case in methods if number < rounds(case)]
            turn = number % len(playing)
            order = [*playing[turn:], *playing[:turn]]
            places += [Place(case, setting, number, pool) for pool in pools for case in order]
    return places


def shown(name: str) -> str:
    """The last part of a folder's path: where things lie is no part of a result."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".", "~")) else name
