"""What is on disk: whole checkpoints, or none."""
