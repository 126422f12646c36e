"""The command line: ``onward demo``, also ``python -m onward demo``."""
