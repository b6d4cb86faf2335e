"""What is trained to draft for one target: heads that read its hidden states."""
