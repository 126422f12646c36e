"""Every way to merge the gradients of many devices.

>>> import onward as ow
>>> ow.merge.TopK(0.01)
TopK(ratio=0.01)
"""

from onward.core.pointing import pointing
from onward.distribute.compressed import LowPrecision, PowerSGD, TopK
from onward.distribute.local import DiLoCo, LocalSGD
from onward.distribute.merge import Average, Bucketed, Devices, Merge, Sum
from onward.distribute.sharded import Sharded

__all__ = [
    "Average",
    "Bucketed",
    "Devices",
    "DiLoCo",
    "LocalSGD",
    "LowPrecision",
    "Merge",
    "PowerSGD",
    "Sharded",
    "Sum",
    "TopK",
]

__getattr__ = pointing(__name__, "ow.merge")
