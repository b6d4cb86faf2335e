"""Models from the Hugging Face hub, in the hub's own cache, which checks what it downloads."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from forerun.models.checkpoint import Progress

WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "*.model",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
UNWANTED = ["*/*", "consolidated*", "adapter_*"]
"""Copies in other formats: `original/`, `onnx/`, Mistral's consolidated weights."""


def looks_like_hub_id(name: str) -> bool:
    """`owner/model`, with the letters that the hub allows."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetch_from_hub(
    name: str, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """The folder of a snapshot with what a text model needs. `HF_HUB_OFFLINE` counts as `offline`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    offline = offline or bool(constants.HF_HUB_OFFLINE)
    at = f"{name} at revision {revision}" if revision else name
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            local_files_only=offline,
            tqdm_class=_bar(f"Fetching {name}", progress),
        )
    except hub.GatedRepoError:
        raise ValueError(
            f"{name} is only for people who accepted its terms: do so on its page and run `hf auth login`"
        ) from None
    except hub.RepositoryNotFoundError:
        raise ValueError(
            f"there is no model {name!r} here or on the hub: check the name, or run `hf auth login` if it is private"
        ) from None
    except hub.RevisionNotFoundError:
        raise ValueError(f"{name} has no revision {revision!r}: choose another one") from None
    except hub.HFValidationError:
        raise ValueError(f"{name!r} is no name of a model on the hub: write owner/model") from None
    except hub.LocalEntryNotFoundError:
        if offline:
            switch = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--offline"
            raise ValueError(f"{at} is not in the hub's cache: run once without {switch}") from None
        raise ValueError(f"the hub cannot be reached and {at} is not in its cache: {_NETWORK}") from None
    except hub.HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else "no answer"
        raise ValueError(f"the hub refused {at} (HTTP {code}): try again later, or {_FOLDER}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"the hub cannot be reached for {at} ({type(error).__name__}): {_NETWORK}") from None
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):  # it depends on the hub's version
            raise
        raise ValueError(f"the hub cannot be reached for {at} ({type(error).__name__}): {_NETWORK}") from None
    if not any(Path(str(folder)).glob("*.safetensors")):
        raise ValueError(f"{name} has no safetensors files: take another copy of the model, or {_FOLDER}")
    return Path(str(folder))


_FOLDER = "name the folder of a model instead"
_NETWORK = f"check the network, or {_FOLDER}"


def _bar(what: str, progress: Progress | None) -> type[Any]:
    """A bar that draws nothing and tells `progress`: the hub wants a class of the `tqdm` kind."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    def begin(bar: Any, *given: Any, **options: Any) -> None:
        # There may be two: bytes that arrive, and bytes that are written, which are told.
        bar.told = not str(options.pop("name", "")).endswith(".transfer")
        tqdm.__init__(bar, *given, **{**options, "file": io.StringIO(), "disable": False})

    def display(bar: Any, *_: Any, **__: Any) -> bool:
        if progress is not None and bar.unit == "B" and bar.told:
            progress(what, int(bar.n), int(bar.total or 0))
        return True

    return type("Told", (tqdm,), {"__init__": begin, "display": display})
