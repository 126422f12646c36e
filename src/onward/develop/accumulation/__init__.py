"""Gradients of several micro-batches for one update: ``accumulate``."""
