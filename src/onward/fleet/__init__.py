"""Trainers and parameter servers in many processes: ``train``, ``start``, and how they work together."""

from onward.fleet.engine import Engine
from onward.fleet.keeper import Durability
from onward.fleet.modes import Async, Bounded, Local, Sync
from onward.fleet.run import Run
from onward.fleet.train import snapshot, start, train

__all__ = ["Async", "Bounded", "Durability", "Engine", "Local", "Run", "Sync", "snapshot", "start", "train"]
