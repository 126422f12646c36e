"""Which optimizer needs the fewest steps to a loss?

The rules are those of track 3 of the nanoGPT speedrun: model, data and batch are fixed, a step is one
gradient, only the optimizer changes. Every row has the model of ``track_gpt``, the parameters that its seed
draws, the same bytes in the same order, and the same AdamW for embedding, head and vectors; what a row
changes is the rule for the matrices of the layers (``optimizer_rows``). What counts is the first step at
which the loss on tokens to validate with is at most the target, looked at every fifth step.

    python -m benchmarks.steps_to_loss --plot steps.svg --json steps.json
    python -m benchmarks.steps_to_loss --tune --optimizers Muon,AdamW
    python -m benchmarks.steps_to_loss --data fineweb10B --optimizers Muon-published --seeds 1

The first line is the contest; the second looks for better rates; the third takes a folder of the speedrun's
token files and GPT-2's sizes, for which no figures are here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from statistics import mean

import onward as ow
from benchmarks.curves import Curve, Result, plot, table
from benchmarks.optimizer_rows import PUBLISHED, ROWS, Row
from benchmarks.report import environment, write_json
from benchmarks.token_files import TEXTS, Data, DataError, load
from benchmarks.track_gpt import Size, init, loss_of

_TUNING_SEED = 1000  # no seed of the contest
_RATES = 5  # runs to find the rate of an optimizer


@dataclass(frozen=True)
class Course:
    """What no optimizer changes: the model, the batch, the loss to reach.

    Attributes:
        size: of the model.
        rows: sequences in the batch of a step.
        parts: micro-batches that a step takes them in.
        steps: of a run, unless the row says otherwise.
        every: steps between two looks at the loss.
        validation: micro-batches that this loss is the mean of.
        target: the loss to reach, in nats a token.
    """

    size: Size
    rows: int
    parts: int
    steps: int
    every: int
    validation: int
    target: float


SMALL = Course(Size(2, 64, 2, 64, 256), 16, 1, steps=300, every=5, validation=4, target=2.4)
TRACK = Course(Size(dtype="bfloat16"), 512, 8, steps=3250, every=25, validation=160, target=3.28)
QUICK = Course(Size(1, 8, 1, 4, 256), 2, 1, steps=4, every=2, validation=1, target=5.54)


def runner(course: Course, data: Data, optimizer: ow.Optimizer) -> Callable[[int, int], Curve]:
    """What trains with an optimizer, compiled once: a curve for a seed and a number of steps."""
    seq, part = course.size.seq, course.rows // course.parts
    tokens = next(data.batches(course.rows, seq))
    loss, params = loss_of(course.size), init(course.size, 0)
    whole = optimizer.minimize(loss, params, *tokens)
    micro = optimizer.minimize(loss, params, *(t[:part] for t in tokens)) if course.parts > 1 else whole
    step = ow.compile(ow.accumulate(whole, course.parts) if course.parts > 1 else whole)
    look = ow.compile(ow.for_evaluation(micro))
    validation = data.validation(part, seq, course.validation)

    def run(seed: int, steps: int) -> Curve:
        state, seen = step.init(init(course.size, seed)), {}
        for n, batch in enumerate(islice(data.batches(course.rows, seq), steps), 1):
            state, _ = step(state, *batch)
            if n % course.every == 0 or n == steps:
                seen[n] = mean(float(look(state, *batch)[1].loss) for batch in validation)
        return Curve(tuple(seen), tuple(seen.values()))

    return run


def contest(course: Course, data: Data, rows: Mapping[str, Row], seeds: int) -> Iterator[Result]:
    """Each optimizer with each seed, which is that of the parameters at the start; the data are the same."""
    for name, row in rows.items():
        try:
            run = runner(course, data, row.build(row.tuned))
            curves = tuple(run(seed, row.tuned.steps) for seed in range(seeds))
            yield Result(name, row.tuned, curves)
        except ow.OnwardError as error:
            yield Result(name, row.tuned, failed=str(error))


def tune(course: Course, data: Data, name: str, row: Row) -> Result:
    """The best rate of as many runs as every optimizer has, with a seed that the contest does not use."""
    found: dict[float, Curve] = {}
    rate = row.tuned.rate
    while len(found) < _RATES:
        tuned = replace(row.tuned, rate=rate)
        found[rate] = runner(course, data, row.build(tuned))(_TUNING_SEED, tuned.steps)
        print(f"{name}: rate {rate:.3g}, loss in the end {found[rate].last:.4f}", flush=True)
        rate = float(f"{following({rate: curve.last for rate, curve in found.items()}):.3g}")
    best = min(found, key=lambda rate: found[rate].last)
    return Result(name, replace(row.tuned, rate=best), (found[best],))


@dataclass(frozen=True)
class Contest:
    """What was the same for all, and every curve."""

    data: str
    course: Course
    results: Sequence[Result]


def following(losses: Mapping[float, float]) -> float:
    """The rate to try next: beyond the best so far; between it and the better neighbour, if there are two."""
    rates = sorted(losses)
    i = rates.index(min(losses, key=losses.__getitem__))
    if i == len(rates) - 1:
        return 2 * rates[i]
    if i == 0:
        return rates[i] / 2
    beside = min(rates[i - 1], rates[i + 1], key=losses.__getitem__)
    return (rates[i] * beside) ** 0.5


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run, print the table, and write what is asked for; return the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps_to_loss", description="Count steps to a loss."
    )
    parser.add_argument("--optimizers", help=f"of {', '.join(ROWS)}, with commas; all unless given")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each optimizer; 3 unless given")
    parser.add_argument("--target", type=float, help="the loss to reach, in nats a token")
    parser.add_argument(
        "--data",
        default="topics",
        help=f"{' or '.join(TEXTS)}, or a folder of token files, for which the model is GPT-2's",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help=f"find a better rate for each, in {_RATES} runs from that of its row",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves into this file, .svg or .png")
    parser.add_argument("--json", metavar="FILE", help="write every curve to this file")
    chosen = parser.parse_args(arguments)
    if chosen.seeds < 1:
        parser.error(f"--seeds is {chosen.seeds}; expected at least 1")
    if chosen.target is not None and not 0 < chosen.target < inf:
        parser.error(f"--target is {chosen.target}; expected a loss above 0")
    try:
        return _run(chosen)
    except DataError as error:
        parser.error(str(error))
    raise AssertionError("argparse has ended the process")


def _run(chosen: argparse.Namespace) -> list[Result]:
    """What the arguments ask for."""
    data = load(chosen.data)
    course = QUICK if chosen.quick else SMALL if chosen.data in TEXTS else TRACK
    size, target = replace(course.size, words=data.words), chosen.target or course.target
    course = replace(course, size=size, target=target)
    rows = _chosen(chosen.optimizers, course)
    _expect_enough(course, data, rows)
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print(f"{data.name}, {course.rows} x {size.seq} tokens a step, target {target:g}", flush=True)
    if chosen.tune:
        results = [tune(course, data, name, row) for name, row in rows.items()]
    else:
        results = list(contest(course, data, rows, chosen.seeds))
    print("\n" + table(results, target))
    if chosen.json:
        write_json(chosen.json, {"steps_to_loss": Contest(data.name, course, results)})
    if chosen.plot:
        plot(chosen.plot, results, target)
    return results


def _chosen(names: str | None, course: Course) -> dict[str, Row]:
    """The rows that are named, with runs as long as here; those that are published have their own."""
    rows = {name: replace(row, tuned=replace(row.tuned, steps=course.steps)) for name, row in ROWS.items()}
    rows |= PUBLISHED if course.rows == TRACK.rows else {}
    wanted = [*rows] if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in rows]:
        raise DataError(f"no optimizer is named {', '.join(unknown)}; there are {', '.join(rows)}")
    return {name: rows[name] for name in wanted}


def _expect_enough(course: Course, data: Data, rows: Mapping[str, Row]) -> None:
    """Refuse data that would have to be read twice."""
    most, there = max(row.tuned.steps for row in rows.values()), data.steps(course.rows, course.size.seq)
    if there < most:
        raise DataError(
            f"{data.name} has tokens for {there:,} steps of {course.rows} x {course.size.seq}; expected "
            f"those for {most:,}. Give more files: no token is read twice."
        )
