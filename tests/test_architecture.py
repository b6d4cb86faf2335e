"""What holds for the source as a whole: one direction of imports, few dependencies, short files, links that work."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "forerun"
NAME = "forerun"

TIERS: tuple[frozenset[str], ...] = (
    frozenset({"kernels"}),
    frozenset({"core"}),
    frozenset({"verify", "trees", "theory", "models"}),
    frozenset({"drafters"}),
    frozenset({"engine"}),
    frozenset({"train", "serve", "bench", "certify"}),
    frozenset({NAME}),  # `forerun/__init__.py`, the face to users
    frozenset({"cli"}),
)
"""Imports go from later tiers to earlier ones, never the other way and never to a neighbour of the same tier."""

TIER = {package: number for number, tier in enumerate(TIERS) for package in tier}
LONGEST = 400


def module_name(path: Path, source: Path = SOURCE) -> str:
    parts = [NAME, *path.relative_to(source).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    return {module_name(path): path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def package_of(module: str) -> str:
    """The package right under `forerun` that a module belongs to; `forerun` itself for its own names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else NAME


# --- one direction of imports --------------------------------------------------------------------------------


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(code: str, module: str, packages: frozenset[str], is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, package of ours) for every import, wherever in the module it stands and however it is spelled."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] == NAME and (alias.name != NAME or alias.asname):
                        yield node.lineno, package_of(alias.name)  # plain `import forerun` shows in its attributes
            case ast.ImportFrom(names=names):
                target = absolute(node, module, is_package)
                if target == NAME:
                    for alias in names:
                        if alias.name in packages:
                            yield node.lineno, alias.name
                        elif not alias.name.startswith("__"):  # everyone may read `__version__`
                            yield node.lineno, NAME
                elif target.startswith(f"{NAME}."):
                    yield node.lineno, package_of(target)
            case ast.Attribute(value=ast.Name(id="forerun"), attr=attribute) if not attribute.startswith("__"):
                yield node.lineno, attribute if attribute in packages else NAME
            case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]) if (
                ast.unparse(function).split(".")[-1] in {"import_module", "__import__"} and target.split(".")[0] == NAME
            ):
                yield node.lineno, package_of(target)


def wrong_imports(modules: Mapping[str, str]) -> list[str]:
    parents = {name.rpartition(".")[0] for name in modules}
    packages = frozenset(package_of(name) for name in modules) | frozenset(TIER)
    found = []
    for module, code in modules.items():
        own = package_of(module)
        if own not in TIER:
            found.append(f"{module}: the package {own!r} has no place in TIERS")
            continue
        for line, other in imported(code, module, packages - {NAME}, module in parents):
            if other not in TIER:
                found.append(f"{module}:{line}: imports {other!r}, which has no place in TIERS")
            elif other != own and TIER[other] >= TIER[own]:
                found.append(f"{module}:{line}: {own} must not import {other}")
    return found


def test_imports_go_one_way() -> None:
    modules = sources()
    assert {"forerun", "forerun.core.law", "forerun.verify.rule", "forerun.cli.main"} <= set(modules)
    assert wrong_imports(modules) == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("forerun.core.law", "import forerun.verify.rule"),
        ("forerun.core.law", "import numpy, forerun.verify"),
        ("forerun.core.law", "from forerun.verify import rule"),
        ("forerun.core.law", "from forerun import verify"),
        ("forerun.core.law", "from forerun import verify as v, core"),
        ("forerun.core.law", "from ..verify import rule"),
        ("forerun.core.law", "from .. import verify"),
        ("forerun.core", "from ..verify import rule"),
        ("forerun.core.law", "def f():\n    if True:\n        from forerun.cli.main import main"),
        (
            "forerun.core.law",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from forerun.trees import chain",
        ),
        ("forerun.core.law", "class A:\n    from forerun.trees import chain"),
        ("forerun.core.law", "try:\n    import forerun.models\nexcept ImportError:\n    pass"),
        ("forerun.core.law", "from importlib import import_module\nimport_module('forerun.verify.rule')"),
        ("forerun.core.law", "__import__('forerun.verify')"),
        ("forerun.core.law", "import forerun.core.exact\nx = forerun.verify.rule"),
        ("forerun.core.law", "import forerun as f"),
        ("forerun.core.law", "import forerun\nx = forerun.LLM"),
        ("forerun.core.law", "from forerun import LLM"),
        ("forerun.verify.rule", "from forerun.trees import chain"),  # the same tier
        ("forerun.bench.runs", "from forerun.serve import app"),
        ("forerun.drafters.eagle", "from forerun.engine import engine"),
        ("forerun", "from forerun.cli.main import main"),
        ("forerun", "from .cli import main"),
        ("forerun.bench.runs", "from forerun import LLM"),
        ("forerun.verify.rule", "from forerun.plugins import x"),  # a package without a place
        ("forerun.plugins.x", "import math"),
        ("forerun.helpers", "import math"),
    ],
)
def test_wrong_imports_are_seen(module: str, code: str) -> None:
    others = dict.fromkeys(("forerun", "forerun.core", "forerun.core.exact", "forerun.verify", "forerun.cli"), "")
    assert len(wrong_imports({**others, module: code})) >= 1


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("forerun.core.law", "import torch\nfrom forerun.core import exact\nfrom . import noise\nfrom .tree import X"),
        ("forerun.core", "from .law import law\nfrom . import law"),
        ("forerun.verify.rule", "import forerun.verify\nfrom forerun.core.tree import DraftTree\nx = forerun.verify"),
        ("forerun.verify.rule", "from ..core import exact"),
        ("forerun.bench.runs", "from forerun import __version__, engine\nfrom forerun.theory import plot"),
        ("forerun.bench.runs", "import forerun\nx = forerun.__version__\ny = forerun.engine.x"),
        ("forerun.cli.main", "import forerun\nfrom forerun import LLM\nimport forerun.bench.runs"),
        ("forerun", "from forerun.engine import LLM\nfrom .core.params import SamplingParams"),
        ("forerun.core.law", "import forerunner\nx = y.forerun.verify\nfrom . import forerun"),
    ],
)
def test_right_imports_pass(module: str, code: str) -> None:
    others = dict.fromkeys(("forerun.core.exact", "forerun.verify.greedy", "forerun.cli.demo"), "")
    assert wrong_imports({**others, module: code}) == []


# --- core dependencies only ----------------------------------------------------------------------------------


def required(distribution: str, seen: dict[str, None]) -> dict[str, None]:
    """The distributions that a plain `pip install` brings: no extras but those that requirements ask for."""
    pending = [Requirement(distribution)]
    while pending:
        wanted = pending.pop()
        marks = sorted({f"{canonicalize_name(wanted.name)}[{extra}]" for extra in ("", *wanted.extras)})
        for mark in marks:
            if mark in seen:
                continue
            seen[mark] = None
            extra = mark.partition("[")[2].rstrip("]")
            for line in importlib.metadata.requires(wanted.name) or []:
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)
    return seen


def allowed_modules() -> set[str]:
    """Top-level modules of the core dependencies."""
    core = {mark.partition("[")[0] for mark in required(NAME, {})}
    distributions = importlib.metadata.packages_distributions()
    return {top for top, owners in distributions.items() if any(canonicalize_name(owner) in core for owner in owners)}


BARE_IMPORTS = """
import importlib, json, sys, sysconfig

allowed, modules, refused = json.load(sys.stdin)
allowed = {*allowed, *sys.stdlib_module_names, "forerun"}
sysconfig.get_config_vars()  # its data is a module that the list of the standard library does not name

class OnlyCore:
    # Stands before a finder and hides what is not allowed, as if it were not installed.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return self.finder.find_spec(name, path, target) if name.partition(".")[0] in allowed else None
    def __getattr__(self, name):  # versions may be asked for
        return getattr(self.finder, name)

already = {name.partition(".")[0] for name in sys.modules} - allowed - {"__main__"}
for name in list(sys.modules):
    if name.partition(".")[0] in already:
        del sys.modules[name]
sys.meta_path[:] = [OnlyCore(finder) for finder in sys.meta_path]
importlib.invalidate_caches()
hidden, failed = [], []
for name in refused:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        hidden.append(name)
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
loaded = [name for name in modules if name in sys.modules]
json.dump({"hidden": hidden, "failed": failed, "loaded": loaded}, sys.stdout)
"""


def import_bare(modules: list[str], refused: list[str]) -> dict[str, list[str]]:
    """Import modules in a fresh process that sees the standard library, forerun and its core dependencies only."""
    process = subprocess.run(
        [sys.executable, "-c", BARE_IMPORTS],
        input=json.dumps([sorted(allowed_modules()), modules, refused]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    answer: dict[str, list[str]] = json.loads(process.stdout)
    return answer


def test_every_module_imports_with_only_the_core_dependencies() -> None:
    modules = [name for name in sources() if not name.endswith("__main__")]  # importing that one would run it
    refused = ["matplotlib", "scipy", "pytest", "hypothesis", "scipy.stats"]
    assert importlib.util.find_spec("pytest") is not None  # it is there, and yet hidden
    answer = import_bare([*modules, "torch", "numpy", "typer", "rich"], refused)
    assert answer["failed"] == []
    assert answer["hidden"] == refused
    assert answer["loaded"] == [*modules, "torch", "numpy", "typer", "rich"]


def test_a_module_that_needs_an_extra_is_seen() -> None:
    answer = import_bare(["scipy.stats", "_pytest.config", "json"], [])
    assert [line.partition(":")[0] for line in answer["failed"]] == ["scipy.stats", "_pytest.config"]
    assert answer["loaded"] == ["json"]


def test_core_dependencies_are_read_from_the_metadata() -> None:
    allowed = allowed_modules()
    assert {"torch", "numpy", "typer", "rich", "sympy", "mpmath"} <= allowed  # mpmath: two steps away
    assert not allowed & {"matplotlib", "scipy", "pytest", "hypothesis", "fastapi", "uvicorn", "mypy", "xdist"}


# --- files and links -----------------------------------------------------------------------------------------


def test_source_files_are_short() -> None:
    lines = {module: len(code.splitlines()) for module, code in sources().items()}
    assert {module: count for module, count in lines.items() if count > LONGEST} == {}


def links(text: str) -> list[str]:
    """Targets of Markdown links, images and reference definitions, and of HTML links, outside of code."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    references = re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", text, flags=re.MULTILINE)
    html = re.findall(r"(?:href|src)=[\"']([^\"']+)[\"']", text)
    return [*inline, *references, *html]


def broken_links(page: Path, root: Path) -> list[str]:
    """Relative links that lead nowhere, or out of the project."""
    broken = []
    for link in links(page.read_text("utf-8")):
        target = link.partition("#")[0]
        if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        place = (page.parent / target).resolve()
        if target.startswith("/") or not place.is_relative_to(root.resolve()) or not place.exists():
            broken.append(f"{page.relative_to(root)}: {link}")
    return broken


def test_links_of_the_documentation_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert ROOT / "README.md" in pages
    assert [link for page in pages for link in broken_links(page, ROOT)] == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "here.md").write_text("# here")
    page = tmp_path / "README.md"
    page.write_text(
        """# A page
[good](docs/here.md) [anchor](docs/here.md#part) [self](#a-page) [web](https://example.org/x) <mail@example.org>
[bad](docs/gone.md) ![bad too](gone.png "title") [absolute](/docs/here.md) [out](../outside.md) [folder](docs)
`[code](not/a/link.md)`
```
[code](neither.md)
```
[ref]: docs/lost.md
<img src="lost.svg"> <a href="docs/here.md">x</a>
"""
    )
    assert broken_links(page, tmp_path) == [
        f"README.md: {link}"
        for link in ("docs/gone.md", "gone.png", "/docs/here.md", "../outside.md", "docs/lost.md", "lost.svg")
    ]
