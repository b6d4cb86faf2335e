"""EAGLE and EAGLE-2 (Li et al., 2024): one layer foresees the states that the output head reads, one after another.

With a tree of a fixed shape it is EAGLE, with a dynamic one EAGLE-2: the weights are the same.
"""

from __future__ import annotations

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.drafters.trained import feature_drafter
from forerun.drafters.trained_folder import HeadOptions as Options

__all__ = ["Options", "make"]


def make(options: Options, setup: Setup) -> Drafter:
    return feature_drafter("eagle", options, setup)
