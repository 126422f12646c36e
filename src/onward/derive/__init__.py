"""Forward, then backward, then update: what a step of training is."""
