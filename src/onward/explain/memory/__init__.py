"""How much memory a step takes, what for, and when."""
