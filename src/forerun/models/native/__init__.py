"""Passes written in C, for processors where that is worth it. Without a compiler everything runs without them."""
