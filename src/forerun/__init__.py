"""Forerun: speculative decoding on one engine, held to one proof of losslessness.

from forerun import LLM, SamplingParams
print(LLM(drafter="ngram").generate("Why is the sky blue?", SamplingParams(max_tokens=200)).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core.params import SamplingParams
    from forerun.engine.completion import Completion, Piece
    from forerun.engine.llm import LLM
    from forerun.engine.request import DraftOptions

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "DraftOptions", "Piece", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imported when first asked for, so that `import forerun` and commands without a model do without PyTorch."""
    match name:
        case "LLM":
            return import_module("forerun.engine.llm").LLM
        case "SamplingParams":
            return import_module("forerun.core.params").SamplingParams
        case "Completion" | "Piece":
            return getattr(import_module("forerun.engine.completion"), name)
        case "DraftOptions":
            return import_module("forerun.engine.request").DraftOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
