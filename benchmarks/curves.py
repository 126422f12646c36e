"""What the contest of optimizers found: losses by steps, as a table and as a picture.

>>> results = [Result("Adam", Tuned(0.1, 10), (Curve((5, 10), (3.0, 2.0)), Curve((5, 10), (2.5, 1.5))))]
>>> print(table(results, target=2.5))
optimizer  rate  run  steps to 2.5  min  max  reached  loss in the end
Adam       0.1   10   8             5    10   2 of 2   1.750
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import mean

import numpy as np

from benchmarks.optimizer_rows import Tuned

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None


@dataclass(frozen=True)
class Curve:
    """The loss on the tokens to validate with, at some steps of one run."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]

    def reaches(self, target: float) -> int | None:
        """The first of the steps at which the loss is at most this, if there is one."""
        return next((n for n, x in zip(self.steps, self.losses, strict=True) if x <= target), None)

    @property
    def last(self) -> float:
        """The loss in the end; infinity for what is not a number."""
        return self.losses[-1] if isfinite(self.losses[-1]) else inf


@dataclass(frozen=True)
class Result:
    """An optimizer's curves, one for each seed, or why it has none."""

    name: str
    tuned: Tuned
    curves: tuple[Curve, ...] = ()
    failed: str = ""

    def reached(self, target: float) -> list[int]:
        """The steps to the target, of the seeds that reach it."""
        found = (curve.reaches(target) for curve in self.curves)
        return sorted(n for n in found if n is not None)


def table(results: Sequence[Result], target: float) -> str:
    """A line for each optimizer: rate, run, steps to the target, loss in the end; then what failed."""
    head = ["optimizer", "rate", "run", f"steps to {target:g}", "min", "max", "reached", "loss in the end"]
    lines = [head, *(_cells(result, target) for result in results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join([*padded, *(f"{r.name}: failed: {r.failed}" for r in results if r.failed)])


def _cells(result: Result, target: float) -> list[str]:
    tuned, reached = result.tuned, result.reached(target)
    begin = [result.name, f"{tuned.rate:.3g}", str(tuned.steps)]
    if result.failed:
        return [*begin, "failed", "", "", "", ""]
    seeds = len(result.curves)
    last = f"{mean(curve.last for curve in result.curves):.3f}"
    if len(reached) < seeds:
        some = [str(reached[0]) if reached else "", ""]
        return [*begin, "not reached", *some, f"{len(reached)} of {seeds}", last]
    return [*begin, f"{mean(reached):.0f}", str(reached[0]), str(reached[-1]), f"{seeds} of {seeds}", last]


def plot(path: str, results: Sequence[Result], target: float) -> None:
    """A line for each optimizer, the mean of its seeds, and the range that they span.

    The first twelfth of the runs, in which all fall alike, may stand out at the top.
    """
    if Figure is None:
        raise SystemExit("--plot needs matplotlib: pip install 'onward[plot]'")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    tops = [target]
    axes.axhline(target, color="0.4", linewidth=0.8, linestyle=":")
    for i, result in enumerate(r for r in results if r.curves):
        losses = np.array([curve.losses for curve in result.curves])
        steps, reached = result.curves[0].steps, result.reached(target)
        told = f"{mean(reached):.0f}" if len(reached) == len(losses) else "not reached"
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--")[i // 10 % 2]}
        axes.plot(steps, losses.mean(0), label=f"{result.name}: {told}", linewidth=1.4, **style)
        tops.append(losses[:, len(steps) // 12].max())
        axes.fill_between(steps, losses.min(0), losses.max(0), color=style["color"], alpha=0.15, linewidth=0)
    axes.set_ylim(top=max(tops) + 0.1)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss on tokens to validate with, nats")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title=f"steps to {target:g}", title_fontsize=8)
    figure.savefig(path)
