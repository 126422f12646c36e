"""Statistics of Variables, computed inside the step: ``watch``."""
