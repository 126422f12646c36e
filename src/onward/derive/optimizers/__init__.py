"""The optimizers, one file per family.

    gradient_descent         one step size for all numbers
    sign                     the sign of the gradient alone
    adaptive                 a step size of its own for every number
    adam                     that, and momentum
    adam_variants            one part of Adam exchanged
    adam_extensions          one memory more than Adam
    layerwise                a step size for each layer, by norms
    factored                 slots of rows and columns in place of whole matrices
    proximal                 parameters that become exactly zero
    schedule_free            averages in place of a schedule
    learning_rate_free       a learning rate found on the way
    distance_over_gradients  the same, by the distance from the start
    muon, shampoo, soap, kron    matrices as matrices
    sophia, lbfgs            second derivatives, and a search along the line

``arithmetic``, ``norms``, ``matrices``, ``checks`` and ``line_search`` hold what several compute alike.
"""

from onward.core.pointing import pointing
from onward.derive.optimizers.adam import Adam, Adamax, AdamW, AMSGrad, LazyAdam
from onward.derive.optimizers.adam_extensions import MARS, Adan, AdEMAMix
from onward.derive.optimizers.adam_variants import ADOPT, AdaBelief, NAdam, RAdam, Yogi
from onward.derive.optimizers.adaptive import Adadelta, Adagrad, DecayedAdagrad, RMSProp
from onward.derive.optimizers.distance_over_gradients import DoG, LDoG
from onward.derive.optimizers.factored import SM3, Adafactor
from onward.derive.optimizers.gradient_descent import ASGD, SGD, Momentum, Nesterov
from onward.derive.optimizers.kron import PSGDKron
from onward.derive.optimizers.layerwise import LAMB, LARS, NovoGrad
from onward.derive.optimizers.lbfgs import LBFGS
from onward.derive.optimizers.learning_rate_free import DAdaptAdam, DAdaptSGD, Prodigy
from onward.derive.optimizers.muon import Muon
from onward.derive.optimizers.proximal import FTRL, ProximalAdagrad, ProximalGD
from onward.derive.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from onward.derive.optimizers.shampoo import Shampoo
from onward.derive.optimizers.sign import Lion, Rprop, SignSGD, Signum
from onward.derive.optimizers.soap import SOAP
from onward.derive.optimizers.sophia import Sophia

__all__ = [
    "ADOPT",
    "ASGD",
    "FTRL",
    "LAMB",
    "LARS",
    "LBFGS",
    "MARS",
    "SGD",
    "SM3",
    "SOAP",
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
    "DAdaptAdam",
    "DAdaptSGD",
    "DecayedAdagrad",
    "DoG",
    "LDoG",
    "LazyAdam",
    "Lion",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "NovoGrad",
    "PSGDKron",
    "Prodigy",
    "ProximalAdagrad",
    "ProximalGD",
    "RAdam",
    "RMSProp",
    "Rprop",
    "ScheduleFreeAdamW",
    "ScheduleFreeSGD",
    "Shampoo",
    "SignSGD",
    "Signum",
    "Sophia",
    "Yogi",
]

__getattr__ = pointing(__name__, "ow.optimizer")
