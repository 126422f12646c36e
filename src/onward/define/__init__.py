"""A pure function becomes a forward Program: trace, and what its arguments are made of."""
