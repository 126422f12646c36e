"""The memory of a step: what it is taken for, what lies there at the peak, and the error where it lacks."""
