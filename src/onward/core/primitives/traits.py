"""The traits of JAX's primitives, each a fact about what a primitive computes or how.

A trait speaks of the primitive, never of who asks: a walk that needs something new to be known of primitives
gets a new trait here, and a column in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Work(Enum):
    """How the operations that it takes are counted; ``core.flops`` has the formula of each."""

    NOTHING = auto()  # numbers are moved, or asked for
    EACH = auto()  # one for each number of the result
    ROOT = auto()  # the same, an exponential, a root or their like each
    SERIES = auto()  # the same, a loop of its own each
    POWER = auto()
    REDUCTION = auto()
    WINDOW = auto()
    WINDOW_SPREAD = auto()
    WINDOW_CHOICE = auto()
    PRODUCT = auto()
    RAGGED_PRODUCT = auto()
    CONVOLUTION = auto()
    SORT = auto()
    LOOKUP = auto()
    UPDATE = auto()
    OPERAND = auto()
    RANDOM = auto()
    CUBE = auto()  # a share of the cube of the side of a matrix
    TRIANGULAR = auto()
    FOURIER = auto()


class Moves(Enum):
    """Where a primitive that only moves numbers puts those of its operand in its result."""

    KEEPS = auto()  # where they stood
    HOLDS = auto()  # where they stood, until all of several operands are there
    ROUNDS = auto()  # where they stood, in another dtype or precision
    RESHAPES = auto()  # in the same order, in another shape
    READS_BITS = auto()  # their bits, as another dtype
    PERMUTES = auto()
    REPEATS = auto()
    CUTS = auto()  # some of them, of which the equation says which
    CUTS_AT = auto()  # some of them, from a place that is an operand
    LOOKS_UP = auto()  # those at the places that an operand holds
    PADS = auto()
    JOINS = auto()  # beside those of other operands
    MAKES = auto()  # nowhere: there is no operand


class Reduces(Enum):
    """The reduction of the numbers along the axes that a primitive takes away."""

    SUM = auto()
    PRODUCT = auto()
    LARGEST = auto()
    SMALLEST = auto()
    ALL = auto()
    ANY = auto()
    ODD = auto()
    PLACE = auto()  # where the largest or the smallest stands
    OTHER = auto()


class Linear(Enum):
    """In which operands it is linear; those that choose or count are apart."""

    FIRST = auto()  # in the first, with the others fixed
    TOGETHER = auto()  # in all at once
    EACH = auto()  # in each of two, with the other fixed


class Exchanges(Enum):
    """The exchange between devices in a collective primitive."""

    SUM = auto()  # each gets the sum of what all have
    EXTREME = auto()
    GATHER = auto()  # each gets what all have
    COPY = auto()  # each gets what one has
    SCATTER = auto()  # each gets its part of the sum
    SWAP = auto()  # each gets a part of what each has
    SHIFT = auto()  # each gets what another one has


class Runs(Enum):
    """How it runs the jaxprs among its parameters."""

    CALL = auto()  # once
    RULE = auto()  # once, differentiated by a rule of its own
    AGAIN = auto()  # once, and again in the backward pass
    SCAN = auto()
    WHILE = auto()
    BRANCH = auto()  # one of them
    SOLVE = auto()
    DEVICES = auto()  # once on each device


class Precision(Enum):
    """In which dtype it computes where a network trains in a low precision."""

    FULL = auto()
    LOW = auto()  # that is where it gains
    FOLLOWS = auto()  # that of what it reads: no range or digits are lost by it


class OnCpu(Enum):
    """The treatment of a primitive by XLA's CPU compiler."""

    APART = auto()  # computed by itself, its result in memory
    ONCE = auto()  # fused with what it reads, and never done twice
    AGAIN = auto()  # fused, and computed again for each reader


class Index(Enum):
    """The result of a primitive on an array of places (indices): places again, or something else."""

    STAYS = auto()  # places: counted from elsewhere, or some of them
    ENDS = auto()  # something else, by what they are for: they are looked at, or told from negative ones


_SAME_ORDER = (Moves.KEEPS, Moves.ROUNDS, Moves.RESHAPES)
_SAME_PLACES = (Moves.KEEPS, Moves.HOLDS, Moves.ROUNDS)
_VIEWS = (Moves.KEEPS, Moves.HOLDS, Moves.RESHAPES, Moves.READS_BITS)
_BY_PLACE = (Moves.REPEATS, Moves.PERMUTES, Moves.CUTS, Moves.PADS, Moves.MAKES)
_OF_ONE = (*_SAME_ORDER, Moves.PERMUTES, Moves.REPEATS, Moves.CUTS, Moves.CUTS_AT)


@dataclass(frozen=True, slots=True)
class Primitive:
    """One row of the table; the defaults are those of an unknown primitive.

    Attributes:
        name: as JAX has it.
        is_elementwise: each number of the result is computed of those in the same place of the operands.
        work: how its operations are counted; ``share`` which part of a cube.
        moves: what it does with numbers, if it computes no others.
        reduces: what it makes of the numbers of an axis that it takes away.
        along: the parameter that holds the axis, or axes, along which it runs and which it keeps.
        on_last: how many of its operands' last axes it looks at together, or the parameter that is as long;
            those before count problems of their own.
        linear: in which operands it is linear.
        power: of a positive factor of its operand, the power by which its result is multiplied.
        compares: its result says how its operands compare.
        tells_finite: its result says whether its operand is a finite number.
        multiplies: its result is the product of its operands, or of one with itself.
        commutes: its two operands may be exchanged.
        chooses: each number of the result is one of those that stand in its place in the operands.
        update: which operand is written into a copy of the first; 0 where none is.
        transposes: whose transpose it is, if not its own.
        exchanges: what devices exchange in it.
        knows_device: the result differs from device to device though the operands do not.
        on_mesh: it says where arrays lie over devices.
        runs: how it runs the jaxprs that it holds.
        draws: it makes random numbers.
        makes_keys: it makes random keys of a key.
        precision: the dtype in which it computes in a low precision.
        leaves_float16: its results leave the range of float16 for numbers that are not large.
        spreads_nonfinite: where an operand is not finite, the result in that place is not.
        divides: its result is the first operand over the second.
        exponential: its result is e to the power of its operand.
        logarithm: its result is the natural logarithm of its operand.
        keeps_positive: its result is its operand where that is not negative.
        conjoins: its result is true where all of its operands are, or holds the bits that all of them have.
        disjoins: its result is true where one of its operands is, or holds the bits that one of them has.
        names: its result is its operand, which it gives a name.
        stops_gradient: no gradient passes through it.
        tells_length: its result is a length that a symbol stands for.
        keeps_sign: of infinities it makes infinity of plus infinity only, and minus infinity of minus.
        fails_at_zero: it, or its derivative, is not finite at 0, or is not defined below.
        index: what becomes of an array of places in it.
        on_cpu: what XLA's CPU compiler does with it.
        functions: of how many dearer functions XLA computes it by cheap arithmetic, where that is not one.
        is_slow_in_loop: that compiler makes slow code of it where it stands in a loop.
    """

    name: str
    is_elementwise: bool = False
    work: Work = Work.EACH
    share: float = 1.0
    moves: Moves | None = None
    reduces: Reduces | None = None
    along: str = ""
    on_last: int | str | None = None
    linear: Linear | None = None
    power: float | None = None
    compares: bool = False
    tells_finite: bool = False
    multiplies: bool = False
    commutes: bool = False
    chooses: bool = False
    update: int = 0
    transposes: str = ""
    exchanges: Exchanges | None = None
    knows_device: bool = False
    on_mesh: bool = False
    runs: Runs | None = None
    draws: bool = False
    makes_keys: bool = False
    precision: Precision = Precision.FULL
    leaves_float16: bool = False
    spreads_nonfinite: bool = False
    divides: bool = False
    exponential: bool = False
    logarithm: bool = False
    keeps_positive: bool = False
    conjoins: bool = False
    disjoins: bool = False
    names: bool = False
    stops_gradient: bool = False
    tells_length: bool = False
    keeps_sign: bool = False
    fails_at_zero: bool = False
    index: Index | None = None
    on_cpu: OnCpu = OnCpu.APART
    functions: int = 0
    is_slow_in_loop: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices, or images and kernels."""
        return self.work in (Work.PRODUCT, Work.RAGGED_PRODUCT, Work.CONVOLUTION)

    @property
    def keeps_order(self) -> bool:
        """Whether its result holds the numbers of its operand, all of them and in their order."""
        return self.moves in _SAME_ORDER

    @property
    def keeps_places(self) -> bool:
        """Whether its results hold the numbers of its operands, each where it stood."""
        return self.moves in _SAME_PLACES

    @property
    def is_view(self) -> bool:
        """Whether its result is its operand's memory, looked at in another way."""
        return self.moves in _VIEWS

    @property
    def is_fusible(self) -> bool:
        """Whether a compiler need not write its result down: each number is found where it is read."""
        return self.moves in _BY_PLACE or (self.is_elementwise and self.work is not Work.SERIES)

    @property
    def is_loop(self) -> bool:
        """Whether it runs jaxprs several times, or one of several."""
        return self.runs in (Runs.SCAN, Runs.WHILE, Runs.BRANCH)

    @property
    def may_overwrite(self) -> bool:
        """Whether its result may be written over an operand that is not read later."""
        return self.is_fusible or self.is_loop or self.update > 0

    @property
    def calls_once(self) -> bool:
        """Whether it computes what the one jaxpr in it does, once, whatever its backward pass is."""
        return self.runs in (Runs.CALL, Runs.RULE, Runs.AGAIN)

    @property
    def sums(self) -> bool:
        """Whether what it takes away of its operands is added up."""
        return Work.PRODUCT is self.work or Reduces.SUM is self.reduces or Exchanges.SUM is self.exchanges

    @property
    def lays_out(self) -> bool:
        """Whether its result holds numbers of its first operand and nothing else, anyhow laid out."""
        return self.moves in _OF_ONE

    @property
    def adds(self) -> bool:
        """Whether its result is the sum of its operands, number by number."""
        return self.is_elementwise and self.linear is Linear.TOGETHER and self.keeps_sign and not self.chooses

    @property
    def equalizes(self) -> bool:
        """Whether it gives all devices the same result, whatever each of them puts in."""
        return self.exchanges in (Exchanges.SUM, Exchanges.EXTREME, Exchanges.GATHER, Exchanges.COPY)

    @property
    def tells_devices_apart(self) -> bool:
        """Whether it may give devices different results for the same operands."""
        return self.knows_device or (self.exchanges is not None and not self.equalizes)
