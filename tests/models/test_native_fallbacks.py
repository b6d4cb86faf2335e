"""Without the processor, without a compiler or with a broken one: a model runs all the same, and the log says why."""

from __future__ import annotations

import logging
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from forerun.core.native import build
from forerun.models.config import Layer, ModelConfig
from forerun.models.native import amx, floats
from forerun.models.norm import RMSNorm
from forerun.models.product import Product, packs
from tests.models.rows import CONFIGS, IN_C, NARROW, VOCABULARY, chain, config, each_pass, names, read, tiny

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
needs_packing = pytest.mark.skipif(not packs(torch.bfloat16), reason="no layout for bfloat16 matrices here")


# --- which models --------------------------------------------------------------------------------------------

OTHERS = {
    "a window": config(2, 2, 64, layers=(Layer(), Layer(window=9))),
    "experts": config(2, 2, 64, layers=(Layer(experts=True),), experts=4, experts_per_token=2, expert_size=32),
    "gelu": config(2, 2, 64, activation="gelu_tanh"),
    "small heads": config(4, 4, 8),
    "odd heads": config(4, 4, 24),
    "wide heads": config(2, 2, 320),
    "many heads share": config(32, 1, 64),
    "odd vocabulary": config(2, 2, 64, vocab_size=100),
    "odd width": config(2, 2, 64, hidden=80),
    "odd inner width": config(2, 2, 64, intermediate_size=112),
    "biases in the MLP": config(2, 2, 64, mlp_bias=True),
    "gemma's norms": config(2, 2, 64, norm_offset=1.0),
    "gemma's sandwich": config(2, 2, 64, sandwich_norms=True),
}


KNOWN = [(dtype, name) for dtype in IN_C for name in names(dtype)]
UNKNOWN = [(dtype, name) for dtype in IN_C for name in OTHERS] + [(torch.bfloat16, name) for name in NARROW]


@pytest.mark.parametrize(("dtype", "name"), UNKNOWN, ids=str)
def test_models_that_it_does_not_know(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IN_C[dtype], "library", object)
    assert not IN_C[dtype].supports((OTHERS | NARROW)[name])


@pytest.mark.parametrize(("dtype", "name"), KNOWN, ids=str)
def test_models_that_it_knows(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IN_C[dtype], "library", object)
    assert IN_C[dtype].supports((CONFIGS | NARROW)[name])
    monkeypatch.setattr(IN_C[dtype], "library", lambda: None)
    assert not IN_C[dtype].supports((CONFIGS | NARROW)[name])


SHAPES = CONFIGS | NARROW | OTHERS


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_model_runs_without(shape: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in IN_C.values():
        monkeypatch.setattr(kind, "library", lambda: None)
    text = torch.arange(40)
    models = tiny(shape), tiny(shape, dtype=torch.float32)
    found, right = (read(model, model.new_storage(64), [chain(text, text[:0], text)])[0].logits for model in models)
    assert models[0].in_c is models[1].in_c is None
    assert found.dtype == torch.bfloat16
    assert (found - right).square().mean().sqrt() < 0.05 * right.square().mean().sqrt()


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled there."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "load", lambda *anything: pytest.fail("it was"))
    assert amx.library.__wrapped__() is None
    assert floats.library.__wrapped__() is None


@each_pass
def test_without_a_compiler_there_is_no_pass_in_c(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(IN_C[dtype], "library", IN_C[dtype].library.__wrapped__)  # not what was found before
    model = tiny(CONFIGS["one head each"], dtype=dtype)
    text = torch.arange(VOCABULARY)
    assert torch.isfinite(read(model, model.new_storage(128), [chain(text, text[:0], text)])[0].logits).all()
    assert model.in_c is None


# --- compilers -----------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """A small program, and an empty cache."""
    caplog.set_level(logging.INFO, build.__name__)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "source" / "answer.c"
    path.parent.mkdir()
    path.write_text('#include "answer.h"\nint answer(void) { return ANSWER; } /* · */\n', "utf-8")
    (path.parent / "answer.h").write_text("#define ANSWER 42\n")
    return path


def built(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "native").iterdir())


def answer(source: Path) -> int:
    library = build.load(source, ["-O1"])
    assert library is not None
    number: int = library.answer()
    return number


@needs_compiler
def test_a_library_is_built_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(source) == 42
    first = built(tmp_path)
    assert len(first) == 1, "and nothing besides is left behind"
    ran: list[list[str]] = []
    run = build._run

    def seen(command: list[str]) -> str:
        ran.append(command[1:])
        return run(command)

    monkeypatch.setattr(build, "_run", seen)
    assert answer(source) == 42
    assert ran == [["--version"]]
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert answer(source) == 43, "a header is part of the source"
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_two_may_build_at_once(source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, [source] * 4)) == [42] * 4
    assert len(built(tmp_path)) == 1


def refused(source: Path, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The one record that says why there is no library."""
    assert build.load(source, ["-O1"]) is None
    (record,) = caplog.records
    assert "passes run in PyTorch" in record.getMessage()
    return record


def test_no_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = refused(source, caplog)
    assert record.levelno == logging.INFO
    assert "gcc" in record.getMessage()


def test_a_compiler_that_is_not_there(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nowhere/gcc")
    refused(source, caplog)


BROKEN = {
    "fails": ("#!/bin/sh\necho no licence >&2\nexit 1\n", "no licence"),
    "fails when it compiles": (
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho unknown option -mamx-tile >&2\nexit 1\n',
        "-mamx-tile",
    ),
    "speaks another language": ('#!/bin/sh\nprintf "\\351chec" >&2\nexit 1\n', "chec"),
    "makes nothing": ("#!/bin/sh\n", "No such file"),
    "makes something else": (
        '#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || echo text > "$last"\n',
        "answer",
    ),
    "is no program": ("\x7fELF but not really", "could not be built"),
    "hangs": ("#!/bin/sh\nexec sleep 60\n", "timed out"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, said = BROKEN[kind]
    compiler = tmp_path / "cc"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    if kind == "hangs":
        monkeypatch.setattr(build, "SECONDS", 0.1)
    record = refused(source, caplog)
    assert record.levelno == logging.WARNING
    assert said in record.getMessage()


@needs_compiler
def test_a_cache_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert refused(source, caplog).levelno == logging.WARNING


@needs_compiler
@pytest.mark.parametrize("maps", [None, "", "7f00-7f01 r-xp 00000000 00:00 1    /my folder/libgomp-1.so.1\n"])
def test_a_system_that_does_not_show_what_is_loaded(
    maps: str | None,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown = tmp_path / "maps"
    if maps is not None:
        shown.write_text(maps)
    monkeypatch.setattr(build, "open", lambda path, **options: shown.open(**options), raising=False)
    record = refused(source, caplog)
    assert record.levelno == logging.WARNING
    assert ("/my folder/libgomp-1.so.1" in record.getMessage()) == bool(maps), "a path may have spaces"


# --- what PyTorch does instead -------------------------------------------------------------------------------


def linears(dtype: torch.dtype, *, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(96, size, bias=bias, dtype=dtype).requires_grad_(False) for size in (64, 32, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype: torch.dtype, bias: bool) -> None:
    parts = linears(dtype, bias=bias)
    x, plus = torch.randn(37, 96).to(dtype), torch.randn(37, 128).to(dtype)
    right = torch.cat([part.double()(x.double()) for part in linears(dtype, bias=bias)], 1)
    product = Product(*parts)
    product.prepare()
    assert (product.packed is not None) == packs(dtype)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(product(x).double(), right, atol=near, rtol=near)
    torch.testing.assert_close(product(x, plus).double(), right + plus.double(), atol=2 * near, rtol=near)


@needs_packing
def test_a_row_of_a_packed_product_is_the_same_beside_any_others() -> None:
    product = Product(*linears(torch.bfloat16, bias=True))
    product.prepare()
    x, plus = torch.randn(130, 96).bfloat16(), torch.randn(130, 128).bfloat16()
    whole, added = product(x), product(x, plus)
    for count in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100):
        for start in (0, 130 - count):
            rows = slice(start, start + count)
            assert torch.equal(product(x[rows]), whole[rows])
            assert torch.equal(product(x[rows], plus[rows]), added[rows])


def test_dropped_matrices_hold_nothing() -> None:
    parts = linears(torch.bfloat16, bias=True)
    product = Product(*parts)
    product.packed = torch.zeros(0)  # whatever the layout is
    product.drop_parts()
    assert [tuple(part.weight.shape) for part in parts] == [(0, 96)] * 3
    with pytest.raises(RuntimeError):
        parts[0](torch.zeros(2, 96, dtype=torch.bfloat16))


def test_matrices_that_were_not_laid_out_anew_stay() -> None:
    parts = linears(torch.float32, bias=False)
    product = Product(*parts)
    product.prepare()
    product.drop_parts()
    assert product.weight is not None
    kept = {tensor.untyped_storage().data_ptr() for tensor in (product.weight, *(part.weight for part in parts))}
    assert len(kept) == 1


def no_such_operation(*anything: object) -> NoReturn:
    raise AttributeError("not in this build")


def test_another_build_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", no_such_operation)
    with pytest.warns(RuntimeWarning, match="the slow way here: not in this build"):
        assert not packs.__wrapped__(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 96)], ids=str)
def test_norms(dtype: torch.dtype, offset: float, shape: tuple[int, ...]) -> None:
    """The prepared form against float64, with numbers of one size, an outlier among them, and very small ones."""
    norm = RMSNorm(shape[-1], config(2, 2, 64, norm_offset=offset))
    generator = torch.Generator().manual_seed(2)
    norm.weight = nn.Parameter(torch.rand(shape[-1], generator=generator).to(dtype) + 0.5, requires_grad=False)
    x = torch.randn(shape, generator=generator)
    x[0] *= 1e-4
    x[1].view(-1)[7] = 1e3
    x = x.to(dtype)

    def wrong(found: Tensor) -> float:
        assert found.dtype == dtype
        wide = x.double()
        right = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * (offset + norm.weight.double())
        typical = right.abs().median(-1, keepdim=True).values
        return float(((found.double() - right).abs() / (right.abs() + 0.1 * typical)).max())

    two_roundings = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20
    assert wrong(norm(x)) < two_roundings
    norm.prepare()
    assert (norm.mirrored is not None) == (dtype == torch.bfloat16)
    assert wrong(norm(x)) < (2.0**-8 if dtype == torch.bfloat16 else two_roundings)
