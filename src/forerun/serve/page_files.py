"""The page's own files, and what it wants to know of the server."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import forerun
from forerun.serve.engines import PLAIN
from forerun.serve.errors import ApiError
from forerun.serve.service import Service

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    kind: str


def page_file(name: str) -> PageFile:
    """One of the page's own files, and nothing else."""
    try:
        path = (FOLDER / name).resolve()
        inside = path.is_relative_to(FOLDER.resolve()) and path.is_file()
    except (ValueError, OSError):  # a name that cannot be one of a file
        inside = False
    if not inside or path.suffix not in KINDS:
        raise ApiError(404, "there is nothing at this address: see /openapi.json")
    return PageFile(path.read_bytes(), KINDS[path.suffix])


def page_info(service: Service) -> dict[str, Any]:
    served = service.served
    names = [*served.drafters, *([] if PLAIN in served.drafters else [PLAIN])]
    return {
        "model": served.name,
        "drafters": [{"name": name, "description": describe(name)} for name in names],
        "default": served.drafters[0],
        "version": forerun.__version__,
        "context_length": served.context_length,
        "has_chat": served.model.tokenizer.has_chat_template,
    }


def describe(drafter: str) -> str:
    """The first sentence of the drafter's own file; a trained one's folder has none."""
    try:
        text = import_module(f"forerun.drafters.{drafter}").__doc__ or ""
    except ImportError:
        return "Trained for this model."
    sentence = " ".join(text.split()).partition(". ")[0]
    return sentence if sentence.endswith(".") else f"{sentence}."
