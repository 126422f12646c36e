"""Trainers and parameter servers in many processes: ``train``, ``start``, and how they work together."""

from onward.execute.cluster.engine import Engine
from onward.execute.cluster.keeper import Durability
from onward.execute.cluster.modes import Async, Bounded, Local, Sync
from onward.execute.cluster.run import Run
from onward.execute.cluster.train import snapshot, start, train

__all__ = ["Async", "Bounded", "Durability", "Engine", "Local", "Run", "Sync", "snapshot", "start", "train"]
