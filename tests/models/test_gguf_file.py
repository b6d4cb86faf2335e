"""The reader of GGUF files: equal to the `gguf` package's own on whole files, and one sentence for any other."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun.models.gguf_file import READABLE, GGUFFile
from tests.models.checkpoints import finish, make, write_gguf

QUANTISED = ("Q4_K", "Q5_K", "Q6_K")  # `gguf` has no quantiser for these


def flat(file: GGUFFile, name: str) -> torch.Tensor:
    return torch.cat([numbers for _, numbers in file.read(name)])


def blocks(kind: Kind, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks with scales that are numbers: their 16-bit floats are made small."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, width // block, size), np.uint8)
    scale = np.float16(0.01).tobytes()
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}.get(kind.name, ())
    for place in places:
        data[..., place : place + 2] = np.frombuffer(scale, np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", READABLE)
def test_every_type_is_dequantised(name: str, tmp_path: Path) -> None:
    kind, rows, width = Kind[name], 70, 8192  # more numbers than are read at once
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    stored = blocks(kind, rows, width) if name in QUANTISED else gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("t", stored, raw_dtype=kind)
    finish(writer)
    file = GGUFFile.open(tmp_path / "t.gguf")
    assert (file.tensors["t"].shape, file.tensors["t"].kind) == ((rows, width), name)
    read = flat(file, "t").view(rows, width)
    torch.testing.assert_close(read, torch.from_numpy(gguf.quants.dequantize(stored, kind).astype(np.float32)))
    if name not in QUANTISED:  # within half a step of a block, whose largest number is about 4
        assert (read - torch.from_numpy(values)).abs().max() < {"F": 0.002, "B": 0.02, "Q": 0.7}[name[0]]
    assert flat(file, "before").tolist() == [1, 1, 1]


def test_a_block_of_six_bits_by_hand(tmp_path: Path) -> None:
    """Q6_K: q = (4 low bits | 2 high bits << 4) − 32, times an 8-bit scale per 16 numbers, times a 16-bit float."""
    data = blocks(Kind.Q6_K, 1, 256)[0]
    low, high, scales = data[:128], data[128:192], data[192:208].view(np.int8)
    expected = np.empty(256)
    for half in range(2):
        for place in range(32):
            ql, qh = low[half * 64 :], high[half * 32 :]
            quarters = [ql[place] & 15, ql[place + 32] & 15, ql[place] >> 4, ql[place + 32] >> 4]
            for quarter, bits in enumerate(quarters):
                number = int(bits) | (int(qh[place]) >> (2 * quarter) & 3) << 4
                index = half * 128 + quarter * 32 + place
                expected[index] = np.float16(0.01).astype(float) * scales[index // 16] * (number - 32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", data[None], raw_dtype=Kind.Q6_K)
    finish(writer)
    read = flat(GGUFFile.open(tmp_path / "t.gguf"), "t").double().numpy()
    np.testing.assert_allclose(read, expected, rtol=1e-5)


def test_the_header_is_what_the_package_reads(tmp_path: Path) -> None:
    path = write_gguf(make("Llama"), tmp_path / "model.gguf", Kind.Q8_0, more={"a.list": [1, 2, 3], "a.bool": True})
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.kind, mine.offset, mine.size) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
    assert len(ours.tensors) == len(theirs.tensors)
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert value == (pytest.approx(expected) if isinstance(value, float) else expected)
    assert ours.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6  # not 9.99999997e-07


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(make("Llama"), tmp_path_factory.mktemp("gguf") / "model.gguf", Kind.Q4_0).read_bytes()


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_file_is_refused(share: float, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"fetch the file again|not a GGUF file"):
        GGUFFile.open(path)


def test_garbage_in_the_header_never_escapes(whole: bytes, tmp_path: Path) -> None:
    """Random bytes in the header: read, or refused in one sentence, and quickly either way."""
    generator = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    refusals: list[str] = []
    for _ in range(300):
        broken = bytearray(whole)
        for place in generator.integers(4, 9000, 3):
            broken[place] = generator.integers(0, 256)
        path.write_bytes(broken)
        try:
            GGUFFile.open(path)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole GGUF file"),
        (b"{}", "not a GGUF file"),
        (b"GGUF", "not a whole GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 50331648"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**62), "not a whole GGUF file"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 99), "not a whole GGUF file"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**60), "not a whole GGUF file"),
    ],
)
def test_what_is_no_gguf_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFFile.open(path)


def test_a_tensor_that_lies_elsewhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    """An offset with a flipped bit would give a tensor the numbers of another one."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    tensors = list(GGUFFile.open(path).tensors.values())
    start = tensors[0].offset
    place = whole.index(struct.pack("<Q", tensors[2].offset - start), whole.index(tensors[2].name.encode()))
    path.write_bytes(whole[:place] + struct.pack("<Q", tensors[1].offset - start) + whole[place + 8 :])
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        GGUFFile.open(path)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", np.zeros((1, 66), np.uint8), raw_dtype=Kind.IQ2_XXS)
    finish(writer)
    with pytest.raises(ValueError, match="t is of the type IQ2_XXS, and Forerun reads F32"):
        GGUFFile.open(tmp_path / "t.gguf")
