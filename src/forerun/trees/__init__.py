"""Which tree to draft. One builder per file; each file shows what it builds through `examples()`."""
