"""Models: one transformer by flags, its key/value cache, and loading."""
