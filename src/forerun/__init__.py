"""Forerun: speculative decoding on one engine, held to one proof of losslessness."""

__version__ = "0.1.0"
