"""Layers."""

from onward.define.declare import data
from onward.define.layer.base import cost, layer, weight

__all__ = ["cost", "data", "layer", "weight"]
