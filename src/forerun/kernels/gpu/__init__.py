"""Triton source. Imported only where a kernel is launched, though importing it without Triton does no harm."""
