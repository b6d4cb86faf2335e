"""Blockwise parallel decoding (Stern et al., 2018): an output for each place ahead, on the last state."""

from __future__ import annotations

from forerun.drafters.drafter import Drafter
from forerun.drafters.find import Setup
from forerun.drafters.trained import side_drafter
from forerun.drafters.trained_folder import HeadOptions as Options

__all__ = ["Options", "make"]


def make(options: Options, setup: Setup) -> Drafter:
    return side_drafter("blockwise", options, setup)
