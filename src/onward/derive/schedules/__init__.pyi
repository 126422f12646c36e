from onward.derive.schedules.base import Schedule as Schedule
from onward.derive.schedules.compose import constant as constant
from onward.derive.schedules.compose import join as join
from onward.derive.schedules.compose import piecewise as piecewise
from onward.derive.schedules.compose import warmup as warmup
from onward.derive.schedules.cycles import cyclic as cyclic
from onward.derive.schedules.cycles import one_cycle as one_cycle
from onward.derive.schedules.cycles import restarts as restarts
from onward.derive.schedules.decay import cosine as cosine
from onward.derive.schedules.decay import linear as linear
from onward.derive.schedules.decay import polynomial as polynomial
from onward.derive.schedules.decay import wsd as wsd
from onward.derive.schedules.fading import exponential as exponential
from onward.derive.schedules.fading import inverse_time as inverse_time
from onward.derive.schedules.fading import natural_exp as natural_exp
from onward.derive.schedules.fading import noam as noam
from onward.derive.schedules.plateau import plateau as plateau

__all__: list[str]
