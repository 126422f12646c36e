"""Rules around the optimizer: what is done to gradients before it, and to parameters after it."""

from onward.core.first_use import from_stub

# The names are listed in __init__.pyi.
__getattr__, __dir__, __all__ = from_stub(__name__, "ow.rule")
