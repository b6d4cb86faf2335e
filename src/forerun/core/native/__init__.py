"""What is worth writing in C, and how it gets built. Without a compiler everything runs without it."""
