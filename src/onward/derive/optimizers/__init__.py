"""The optimizers, one file per family.

``gradient_descent``: one step size for all numbers. ``sign``: the sign of the gradient alone. ``adaptive``: a
step size of its own for every number. ``adam``: that and momentum; ``adam_variants``: one part of it
exchanged; ``adam_extensions``: one memory more. ``arithmetic``: what they compute alike.
"""

from onward.derive.optimizers.adam import Adam, Adamax, AdamW, AMSGrad, LazyAdam
from onward.derive.optimizers.adam_extensions import MARS, Adan, AdEMAMix
from onward.derive.optimizers.adam_variants import ADOPT, AdaBelief, NAdam, RAdam, Yogi
from onward.derive.optimizers.adaptive import Adadelta, Adagrad, DecayedAdagrad, RMSProp
from onward.derive.optimizers.gradient_descent import ASGD, SGD, Momentum, Nesterov
from onward.derive.optimizers.sign import Lion, Rprop, SignSGD, Signum

__all__ = [
    "ADOPT",
    "ASGD",
    "MARS",
    "SGD",
    "AMSGrad",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "DecayedAdagrad",
    "LazyAdam",
    "Lion",
    "Momentum",
    "NAdam",
    "Nesterov",
    "RAdam",
    "RMSProp",
    "Rprop",
    "SignSGD",
    "Signum",
    "Yogi",
]
