"""Which options of XLA's CPU compiler make a step fast, and does it gain from cores as devices?

No set of options is best for every model, so none but the cure of faults (``onward.core.compiler``) is given
by default, and ``ow.tune`` finds the best of one Program on one machine. Each side is compared with the step
as ``compile`` makes it, in processes of their own, in turn; a side that kills its process is named.

    no YNN                 products and convolutions by XLA itself (Eigen), not by the library YNNPACK
    YNN for products       YNNPACK is given single products only; the default of jaxlib 0.10.2, which it cures
    YNN for convolutions   and single convolutions
    oneDNN                 products, with what is around them, by the library oneDNN
    no fission             loops as they are
    2 cores                ``compile(program, cores=2)``: two replicas on two host devices
"""

from __future__ import annotations

from benchmarks.contest import contest
from benchmarks.harness import ONWARD, Row
from benchmarks.sides import CORES, NO_FISSION, NO_YNN, ONEDNN, YNN_CONVOLUTIONS, YNN_PRODUCTS

_ALL = (CORES, NO_YNN, YNN_PRODUCTS, ONEDNN)
CASES = {
    "MLP, Adam": _ALL,
    "4-layer transformer": _ALL,
    "CNN, Momentum": (*_ALL, YNN_CONVOLUTIONS),
    "LSTM, Adagrad": (*_ALL, NO_FISSION),
}
_TARGETS = {"4-layer transformer": 0.9, "CNN, Momentum": 0.9, "LSTM, Adagrad": 0.9}  # of two cores


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each side of each workload; ``quick`` takes the smallest, and nothing that may kill it."""
    rows = []
    for work, chosen in list(CASES.items())[: 1 if quick else None]:
        sides = [side for side in chosen if not (quick and side == ONEDNN)]
        targets = {CORES: _TARGETS[work]} if work in _TARGETS else {}
        rows += contest(work, sides, rounds, targets, quick, against=dict.fromkeys(sides, ONWARD))
    return rows
