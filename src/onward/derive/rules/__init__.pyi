from onward.derive.rules.averages import EMA as EMA
from onward.derive.rules.averages import SWA as SWA
from onward.derive.rules.averages import PolyakAverage as PolyakAverage
from onward.derive.rules.clip import AdaptiveClip as AdaptiveClip
from onward.derive.rules.clip import ClipByGlobalNorm as ClipByGlobalNorm
from onward.derive.rules.clip import ClipByNorm as ClipByNorm
from onward.derive.rules.clip import ClipByValue as ClipByValue
from onward.derive.rules.decay import L1 as L1
from onward.derive.rules.decay import L2 as L2
from onward.derive.rules.decay import WeightDecay as WeightDecay
from onward.derive.rules.gradients import Centralize as Centralize
from onward.derive.rules.gradients import Noise as Noise
from onward.derive.rules.sharpness import SAM as SAM
from onward.derive.rules.steps import Cautious as Cautious
from onward.derive.rules.steps import Lookahead as Lookahead

__all__: list[str]
