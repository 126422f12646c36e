"""The command line: ``onward demo``, ``onward launch``; also ``python -m onward``."""
