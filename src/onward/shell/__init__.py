"""The command line: ``onward demo``, ``onward show``, ...; also ``python -m onward``."""
