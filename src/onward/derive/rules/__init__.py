"""Rules around the optimizer: what is done to gradients before it, and to parameters after it."""

from onward.core.pointing import pointing
from onward.derive.rules.averages import EMA, SWA, PolyakAverage
from onward.derive.rules.clip import AdaptiveClip, ClipByGlobalNorm, ClipByNorm, ClipByValue
from onward.derive.rules.decay import L1, L2, WeightDecay
from onward.derive.rules.gradients import Centralize, Noise
from onward.derive.rules.sharpness import SAM
from onward.derive.rules.steps import Cautious, Lookahead

__all__ = [
    "EMA",
    "L1",
    "L2",
    "SAM",
    "SWA",
    "AdaptiveClip",
    "Cautious",
    "Centralize",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "Lookahead",
    "Noise",
    "PolyakAverage",
    "WeightDecay",
]

__getattr__ = pointing(__name__, "ow.rule")
