"""Multi-token prediction (DeepSeek-V3, 2024): a module that the target is trained with, used again and again."""

from __future__ import annotations

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.drafters.trained import feature_drafter
from forerun.drafters.trained_folder import HeadOptions as Options

__all__ = ["Options", "make"]


def make(options: Options, setup: Setup) -> Drafter:
    return feature_drafter("mtp", options, setup)
