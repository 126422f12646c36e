"""Someone's existing training step as a Program: what goes in, which pass does what, what is carried on."""

from onward.explain.inspect.inspect import inspect

__all__ = ["inspect"]
