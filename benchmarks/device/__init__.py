"""Forerun on an accelerator, measured: passes against the floor of the memory, shares of a step, texts, throughput."""
