"""Loops that compute turn by turn only what has to wait for the turn before."""
