"""EAGLE-3 (Li et al., 2025): one layer on states of a low, a middle and a high layer, trained on its own guesses."""

from __future__ import annotations

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.drafters.trained import feature_drafter
from forerun.drafters.trained_folder import HeadOptions as Options

__all__ = ["Options", "make"]


def make(options: Options, setup: Setup) -> Drafter:
    return feature_drafter("eagle3", options, setup)
