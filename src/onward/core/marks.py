"""The types of the ops that passes look for: known by identity, so that no name a user gives is one of them.

>>> name = "fence"
>>> FENCE == name, FENCE is name, FENCE is Mark(name)
(True, False, True)
"""

from __future__ import annotations


class Mark(str):
    """The type of an op that only Onward makes: a text, and one object for each.

    A function or a rule of a user's may have the same name; its ops are of the plain text.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Mark:
        """The one Mark of this text."""
        return _known.setdefault(text, super().__new__(cls, text))

    def __reduce__(self) -> tuple[type[Mark], tuple[str]]:
        return Mark, (str(self),)


_known: dict[str, Mark] = {}


def gradient_type(of: str) -> str:
    """The type of the op that computes the gradient of ops of a type."""
    return Mark(f"{of}_grad") if isinstance(of, Mark) else f"{of}_grad"


ACCUMULATE = Mark("accumulate")
ADVANCE = Mark("advance")  # the state of an optimizer that belongs to no parameter
ATTENTION = Mark("attention")  # of queries over keys, all of it
CAST = Mark("cast")  # between the dtypes of mixed precision
CHUNK = Mark("chunk")  # a loss head in chunks of rows
CHECK = Mark("check_finite")  # looks at a step as ``check_finite`` does
COUNT = Mark("count")  # the steps
DEQUANTIZE = Mark("dequantize")  # a weight that is kept in fewer bits
FENCE = Mark("fence")
FETCH = Mark("fetch")  # state or an activation from host memory, for the op that reads it
FLOAT8_PRODUCT = Mark("float8_product")  # of two operands that are rounded to float8
FINITE = Mark("finite")  # looks at a step as ``guard`` does
GO_ON = Mark("go_on")
KEEP = Mark("keep")  # old values: (whether the step counts, new, old)
LOCAL = Mark("local")  # initializer that gives every device its own of a parameter
OF_WHOLE_BATCH = Mark("of_whole_batch")  # a statistic of the data, for a micro-batch
ONES = Mark("ones")  # the seed of a backward pass
OWN_KEY = Mark("own_key")  # for random numbers of a device's own
PART = Mark("part")  # of a parameter, on the device that updates it
REMEMBER = Mark("remember")  # the largest values of a tensor in the last steps, for its scale in float8
SCALE = Mark("scale")  # a sum over the examples of one device, to what it stands for
SCALE_LOSS = Mark("scale_loss")
SCHEDULE = Mark("schedule")
STACK = Mark("stack")  # arrays of one type on top of each other
STOP = Mark("stop")
STORE = Mark("store")  # next state, or an activation, in host memory
SUM = Mark("sum")  # of gradients
UNSCALE = Mark("unscale")  # gives a scaled gradient its size, which is not a rule
UNSTACK = Mark("unstack")
WATCH = Mark("watch")
WEIGH = Mark("weigh")  # the loss of a device by what its examples weigh

MARKS = frozenset(found for found in list(globals().values()) if isinstance(found, Mark))
