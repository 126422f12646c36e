"""Attention, found in any spelling, as one op that computes it by a better kernel."""
