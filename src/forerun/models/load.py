"""From the name that a user gives to a model that runs.

A name is a path where there is one; else a built-in model; else `owner/model` on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from forerun.models.builtin import BUILTINS, builtin_gguf
from forerun.models.checkpoint import Progress, load_tensors, model_config, read_config
from forerun.models.config import ModelConfig
from forerun.models.convert import conversion_folder, converted
from forerun.models.gguf_file import MAGIC
from forerun.models.hf_config import is_ours
from forerun.models.hub import fetch_from_hub, looks_like_hub_id
from forerun.models.store import MANIFEST, Conversion, Store
from forerun.models.target import TargetModel
from forerun.models.tokenizer import Tokenizer

Kind = Literal["built-in", "folder", "gguf", "hub"]


@dataclass(frozen=True)
class Source:
    """What a name turned out to be: a folder on this machine, and what its config says."""

    name: str
    kind: Kind
    folder: Path
    hf_config: dict[str, Any]
    config: ModelConfig | None
    """None for a family that our transformer does not run; the adapter does."""


def resolve(
    name: str,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    offline: bool = False,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Source:
    """Find a model, fetching and converting what is missing. `dtype` is what GGUF weights are converted to."""
    store = store or Store.default()
    kind, place = identify(name)
    if revision is not None and kind != "hub":
        raise ValueError(f"{name} has no revisions: leave --revision out, or name a model on the hub")
    if kind == "folder":
        return _source(name, kind, place)
    if kind == "gguf":
        sha256 = store.sha256(place, progress)
        made = converted(place, dtype, store, name=place.name, sha256=sha256, progress=progress)
        return _source(name, kind, made.folder)
    if kind == "built-in":
        return _source(name, kind, _builtin(name, dtype, store, offline, progress).folder)
    return _source(name, kind, fetch_from_hub(name, revision=revision, offline=offline, progress=progress))


def identify(name: str) -> tuple[Kind, Path]:
    """What a name is, without fetching anything."""
    path = _path(name)
    if name and path.is_dir():
        return "folder", path
    if name and path.is_file():
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        if start == MAGIC or path.suffix == ".gguf":
            return "gguf", path
        raise ValueError(f"{name} is not a GGUF file: name a GGUF file, or the folder of a Hugging Face model")
    if name in BUILTINS:
        return "built-in", path
    if looks_like_hub_id(name) and not name.endswith(".gguf"):
        return "hub", path
    raise ValueError(
        f"there is no model {name!r}: name a folder, a GGUF file, owner/model on the Hugging Face hub, or a built-in "
        f"model ({', '.join(BUILTINS)})"
    )


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # `~somebody` who is not a user of this machine
        return Path(name)


def _builtin(name: str, dtype: torch.dtype, store: Store, offline: bool, progress: Progress | None) -> Conversion:
    """A conversion in the cache needs no GGUF file; its name says which content it was made from."""
    builtin = BUILTINS[name]
    folder = conversion_folder(store, builtin.sha256, dtype)
    gguf = builtin.path(store)
    if not (folder / MANIFEST).is_file():
        gguf = builtin_gguf(builtin, store, offline=offline, progress=progress)
    return converted(gguf, dtype, store, name=name, sha256=builtin.sha256, progress=progress)


def _source(name: str, kind: Kind, folder: Path) -> Source:
    hf = read_config(folder)
    return Source(name, kind, folder, hf, model_config(folder, hf) if is_ours(hf) else None)


def load_model(
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    rounds: bool = False,
    progress: Progress | None = None,
) -> TargetModel:
    """Our transformer with the weights of `source`, or an adapter around another family's model. With `rounds` its rows
    may be rounded to 16 bits where its matrices have 4 or 8."""
    device = torch.device(device)
    if source.config is None:
        from forerun.models.adapter import load_adapter

        return load_adapter(source.folder, dtype, device)
    from forerun.models.transformer import Transformer

    tensors = load_tensors(source.folder, source.config, dtype, device, progress)
    with torch.device("meta"), _Uninitialised():
        model = Transformer(source.config)
    if source.config.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    if source.config.tied:
        model.tie()  # one parameter, not two that share memory
    model.rounds = rounds
    return model.requires_grad_(False).eval()


class _Uninitialised(TorchFunctionMode):
    """Leaves out the random numbers that layers begin with. On the meta device they would have no effect, and yet the
    first of them makes PyTorch import for two seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def load_tokenizer(source: Source) -> Tokenizer:
    return Tokenizer.from_folder(source.folder)
