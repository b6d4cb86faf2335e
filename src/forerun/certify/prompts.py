"""Prompts of our own, so that a certificate needs no file. Some ask for what repeats itself: drafters that copy have
something to guess there."""

PROMPTS = (
    "Why is the sky blue?",
    "Repeat this line three times: the cat sat on the mat and the cat sat on the hat.",
    "Write a Python function that adds two numbers, then one that subtracts two numbers.",
    "Count from one to twenty in words.",
    "Translate to French: the red house, the blue house, the green house.",
    "List five fruits, and say of each what colour it is.",
    "A train leaves at nine and arrives at eleven. How long does it take? Think step by step.",
    "Tell a very short story about a dog that finds a dog.",
    "Copy exactly: alpha beta gamma alpha beta gamma alpha beta gamma.",
    "What is the difference between weather and climate?",
    "Write a JSON object with the keys name, age and city for three people.",
    "Summarise: water boils at 100 degrees; water freezes at 0 degrees; water is liquid between.",
)
