"""Measurements, and the record of what each was measured with."""
