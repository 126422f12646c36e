"""Onward: you write the forward pass, Onward derives the rest.

    core        what a Program is
    define      a pure function becomes a forward Program
    derive      forward, then backward, then update
    distribute  one Program for many devices
    execute     a Program becomes an executable and runs
    explain     what a person wants to know about a Program
    serve       a trained Program becomes a file, and answers
    shell       the command line

>>> import jax.numpy as jnp, onward as ow
>>> def loss(params, x, y):
...     return jnp.mean((x @ params["w"] - y) ** 2)
>>> params = {"w": jnp.zeros((2, 1))}
>>> x, y = jnp.eye(2), jnp.ones((2, 1))
>>> program = ow.SGD(0.5).minimize(loss, params, x, y)
>>> step = ow.compile(program)
>>> state = step.init(params)
>>> for _ in range(20):
...     state, out = step(state, x, y)
>>> [[round(float(w), 2)] for w in state.parameters["w"][:, 0]]
[[1.0], [1.0]]
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from onward.core.check import check
from onward.core.cost import Cost, cost
from onward.core.errors import (
    ArgumentError,
    CheckpointError,
    ClusterError,
    GraphError,
    HyperparameterError,
    LossError,
    MissingExtraError,
    ModelFileError,
    NonFiniteError,
    OnwardError,
    PeerError,
    RecipeError,
    ServeError,
    StateError,
    TraceError,
    UnknownNameError,
    UnreachedWarning,
)
from onward.core.homes import homes
from onward.core.jaxprs.body import body_of
from onward.core.program import Op, Program, Target, Variable
from onward.core.show import show
from onward.core.transform import transform
from onward.core.walk import ancestors, consumers, descendants, liveness, producers, prune
from onward.core.words import Kind, Pass, Placement, UpdateType
from onward.define import initializer, layer
from onward.define.declare import assign, data, is_training, key, parameter, state, var
from onward.define.deferred import Deferred
from onward.define.lazy import Lazy
from onward.define.trace import trace
from onward.derive import schedules as schedule
from onward.derive.accumulation.accumulate import accumulate
from onward.derive.backward import append_backward, gradients
from onward.derive.check_finite import check_finite
from onward.derive.clip import clip_by_global_norm
from onward.derive.error_clip import error_clip
from onward.derive.fence import fence, fences, worth_fencing
from onward.derive.for_evaluation import for_evaluation
from onward.derive.for_test import for_test
from onward.derive.guard import guard
from onward.derive.mixed.mixed_precision import mixed_precision
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers import (
    ADOPT,
    ASGD,
    FTRL,
    LAMB,
    LARS,
    LBFGS,
    MARS,
    SGD,
    SM3,
    SOAP,
    AdaBelief,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Adan,
    AdEMAMix,
    AMSGrad,
    DAdaptAdam,
    DAdaptSGD,
    DecayedAdagrad,
    DoG,
    LazyAdam,
    LDoG,
    Lion,
    Momentum,
    Muon,
    NAdam,
    Nesterov,
    NovoGrad,
    Prodigy,
    ProximalAdagrad,
    ProximalGD,
    PSGDKron,
    RAdam,
    RMSProp,
    Rprop,
    ScheduleFreeAdamW,
    ScheduleFreeSGD,
    Shampoo,
    SignSGD,
    Signum,
    Sophia,
    Yogi,
)
from onward.derive.recompute.recompute import recompute
from onward.derive.recompute.report import recomputed
from onward.derive.rewrite.rewrite import rewrite
from onward.derive.roll.cost import worth_rolling
from onward.derive.roll.roll import roll, rolls_of
from onward.derive.rule import GradientRule, Hyperparameter, ParameterRule, Schedule, Slots
from onward.derive.rules import (
    EMA,
    L1,
    L2,
    SAM,
    SWA,
    AdaptiveClip,
    Cautious,
    Centralize,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Lookahead,
    Noise,
    PolyakAverage,
    WeightDecay,
)
from onward.derive.seam import forward_pass, update_pass
from onward.derive.update.groups import Group
from onward.derive.update.loss import Loss
from onward.derive.update.plan import UpdatePlan
from onward.derive.update.update import append_update
from onward.derive.watch.statistics import Histogram, Statistic
from onward.derive.watch.watch import watch
from onward.distribute.compressed import LowPrecision, PowerSGD, TopK
from onward.distribute.local import DiLoCo, LocalSGD
from onward.distribute.merge import Average, Bucketed, Devices, Merge, Sum
from onward.distribute.plan import Plan, plan
from onward.distribute.replicate import replicate
from onward.distribute.sharded import Sharded
from onward.distribute.split.shards import Shard
from onward.distribute.split.split import Split, split
from onward.execute import cluster
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.checkpoint.loaded import Checkpoint
from onward.execute.compile import compile
from onward.execute.evaluator import Evaluator
from onward.execute.gradient_machine import GradientMachine
from onward.execute.host_memory import keep_host_memory
from onward.execute.loop.batches import Batches, batches
from onward.execute.loop.events import EarlyStop, Event, EventKind, StopTraining
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchHistory
from onward.execute.model import Model
from onward.execute.nonfinite.finding import NonFinite
from onward.execute.out import Out
from onward.execute.outs import Outs
from onward.execute.restore import Restored
from onward.execute.scope import Scope
from onward.execute.session import Session
from onward.execute.state import State
from onward.execute.step import Step
from onward.execute.storage.storage import Storage
from onward.execute.train import optimize, train
from onward.execute.trainer import Trainer
from onward.execute.tuning import StepPlan
from onward.explain.diff.diff import Diff, diff
from onward.explain.draw.draw import Drawing, draw
from onward.explain.find_nonfinite import find_nonfinite
from onward.explain.inspect.inspect import inspect
from onward.explain.memory.memory import Beside, Memory, memory
from onward.explain.profile.profile import Profile, profile
from onward.explain.summary.summary import Summary, summary, summary_by_pass
from onward.explain.watched.plot import plot_watched
from onward.explain.watched.tensorboard import TensorBoard, to_tensorboard
from onward.serve.endpoint.endpoint import Endpoint
from onward.serve.export.load import load, load_step
from onward.serve.export.save import save

__version__ = version("onward")

__all__ = [
    "ADOPT",
    "ASGD",
    "EMA",
    "FTRL",
    "L1",
    "L2",
    "LAMB",
    "LARS",
    "LBFGS",
    "MARS",
    "SAM",
    "SGD",
    "SM3",
    "SOAP",
    "SWA",
    "AMSGrad",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "AdaptiveClip",
    "ArgumentError",
    "Average",
    "Batches",
    "Beside",
    "Bucketed",
    "Cautious",
    "Centralize",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClusterError",
    "Cost",
    "DAdaptAdam",
    "DAdaptSGD",
    "DecayedAdagrad",
    "Deferred",
    "Devices",
    "DiLoCo",
    "Diff",
    "DoG",
    "Drawing",
    "EarlyStop",
    "Endpoint",
    "Evaluator",
    "Event",
    "EventKind",
    "GradientMachine",
    "GradientRule",
    "GraphError",
    "Group",
    "Histogram",
    "History",
    "Hyperparameter",
    "HyperparameterError",
    "Kind",
    "LDoG",
    "Lazy",
    "LazyAdam",
    "Lion",
    "LocalSGD",
    "Lookahead",
    "Loss",
    "LossError",
    "LowPrecision",
    "Memory",
    "Merge",
    "MissingExtraError",
    "Model",
    "ModelFileError",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "Noise",
    "NonFinite",
    "NonFiniteError",
    "NovoGrad",
    "OnwardError",
    "Op",
    "Optimizer",
    "Out",
    "Outs",
    "PSGDKron",
    "ParameterRule",
    "Pass",
    "PeerError",
    "Placement",
    "Plan",
    "PolyakAverage",
    "PowerSGD",
    "Prodigy",
    "Profile",
    "Program",
    "ProximalAdagrad",
    "ProximalGD",
    "RAdam",
    "RMSProp",
    "RecipeError",
    "Restored",
    "Rprop",
    "Schedule",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Scope",
    "ServeError",
    "Session",
    "Shampoo",
    "Shard",
    "Sharded",
    "SignSGD",
    "Signum",
    "Slots",
    "Sophia",
    "Split",
    "State",
    "StateError",
    "Statistic",
    "Step",
    "StepPlan",
    "StopTraining",
    "Storage",
    "Sum",
    "Summary",
    "Target",
    "TensorBoard",
    "TopK",
    "TraceError",
    "Trainer",
    "UnknownNameError",
    "UnreachedWarning",
    "UpdatePlan",
    "UpdateType",
    "Variable",
    "WatchHistory",
    "WeightDecay",
    "Yogi",
    "accumulate",
    "ancestors",
    "append_backward",
    "append_update",
    "assign",
    "batches",
    "body_of",
    "check",
    "check_finite",
    "clip_by_global_norm",
    "cluster",
    "compile",
    "consumers",
    "cost",
    "data",
    "descendants",
    "diff",
    "draw",
    "error_clip",
    "fence",
    "fences",
    "find_nonfinite",
    "for_evaluation",
    "for_test",
    "forward_pass",
    "gradients",
    "guard",
    "homes",
    "initializer",
    "inspect",
    "is_training",
    "keep_host_memory",
    "key",
    "layer",
    "liveness",
    "load",
    "load_step",
    "memory",
    "mixed_precision",
    "optimize",
    "parameter",
    "plan",
    "plot_watched",
    "producers",
    "profile",
    "prune",
    "recompute",
    "recomputed",
    "replicate",
    "rewrite",
    "roll",
    "rolls_of",
    "save",
    "schedule",
    "show",
    "split",
    "state",
    "summary",
    "summary_by_pass",
    "to_tensorboard",
    "trace",
    "train",
    "transform",
    "update_pass",
    "var",
    "watch",
    "worth_fencing",
    "worth_rolling",
]

if not TYPE_CHECKING:  # a type checker shall know the names of the list, and no other

    def __getattr__(name):
        """``AdagradOptimizer``, as the early designs of Paddle call it, is ``Adagrad``."""
        stem = name.removesuffix("Optimizer").lower()
        for own in __all__ if name.endswith("Optimizer") else ():
            found = globals()[own]
            if own.lower() == stem and isinstance(found, type) and issubclass(found, Optimizer):
                return found
        raise AttributeError(f"module 'onward' has no attribute {name!r}", name=name)
