"""The certificate that a target, a drafter and a rule write the target's own text, here and now."""
