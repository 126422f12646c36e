"""The training loop around a step: batches, events, progress, history, interruptions."""
