"""Training: drafters that learn from the target's own answers."""
