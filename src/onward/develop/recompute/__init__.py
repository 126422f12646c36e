"""Which activations a step keeps for its backward pass, and which it computes again."""
