"""Does every transform of an adopted step train as the step does in plain JAX, or say why it cannot?

    python -m tests.torture.adopt_table                       # 12 programs, 11 transforms
    python -m tests.torture.adopt_table small_gpt ppo_update  # some of the programs

Each cell trains for two steps, and compares all that the step carries on, and the loss, with the step itself:
within 1e-4 of the largest number of each array (Adam divides by small numbers), 6e-2 in bfloat16. The cells:

    =        equal
    runs     trains, where the numbers have to be others: keys and statistics that go from part to part
    warned   trains to other numbers, as a warning says; it stands below
    no       refused; the sentence stands below
    WRONG    trained to other numbers
    ERROR    an error that is none of ours
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np
from flax import nnx
from tests.explain.adopted_programs import PUBLISHED, Published

import onward as ow

STEPS = 2


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda p: p,
    "length": lambda p: p,
    "accumulate": lambda p: ow.accumulate(p, 2),
    "bfloat16": ow.mixed_precision,
    "Average x8": lambda p: ow.replicate(p, 8),
    "roll": ow.roll,
    "recompute": lambda p: ow.recompute(p, 0.95),
    "guard": ow.guard,
    "watch": lambda p: ow.watch(p, gradients=True, every=1),
    "save": lambda p: p,
    "for_test": ow.for_test,
}


def arrays(tree: Any) -> list[np.ndarray]:
    """The numbers of a tree; keys by their data."""
    found = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    is_key = [jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found]
    return [
        np.asarray(jax.random.key_data(x) if key else x, np.float64)
        for x, key in zip(found, is_key, strict=True)
    ]


def longer(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch twice over."""
    return tuple(
        jax.tree.map(lambda x: np.concatenate([x, x[::-1]]) if isinstance(x, np.ndarray) else x, part)
        for part in data
    )


def by_itself(case: Published, data: tuple[Any, ...]) -> tuple[Any, Any]:
    """State and loss after the steps, in plain JAX."""
    loss = None
    if is_modules(case):
        state = nnx.clone(case.state)
        for _ in range(STEPS):
            loss = case.step(*state, *data)
        return nnx.split(state)[1], loss
    state = jax.tree.map(
        lambda x: x.copy() if isinstance(x, jax.Array) else x, case.state
    )  # some are donated
    for _ in range(STEPS):
        state, loss = case.parts(case.step(*state, *data))
    return state, loss


def is_modules(case: Published) -> bool:
    return isinstance(case.state[0], nnx.Module)


def begun(case: Published) -> Any:
    """What ``step.init`` is given."""
    if is_modules(case):
        return nnx.split(case.state)[1]
    return case.state if len(case.state) > 1 else case.state[0]


def cell(case: Published, program: Any, name: str) -> tuple[str, str]:
    """The outcome of one transform, and a sentence."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outcome, sentence = _cell(case, program, name)
    mine = [str(w.message) for w in told if w.category is UserWarning]
    return ("warned", mine[0]) if outcome == "WRONG" and mine else (outcome, sentence)


def _cell(case: Published, program: Any, name: str) -> tuple[str, str]:
    data = longer(case.data) if name == "length" else case.data
    try:
        changed = TRANSFORMS[name](program)
        if name == "for_test":
            return tested(case, program, changed)
        step = ow.compile(changed)
        state = step.init(begun(case))
        for i in range(STEPS):
            if name == "save" and i == 1:
                with tempfile.TemporaryDirectory() as folder:
                    step, state = ow.load_step(ow.save(step, Path(folder) / "step.onward", state))
            state, out = step(state, *data)
    except ow.OnwardError as error:
        return "no", f"{type(error).__name__}: {error}"
    except Exception as error:  # the table is to show them
        return "ERROR", f"{type(error).__name__}: {error}"[:600]
    wanted, loss = by_itself(case, data)
    bound = 6e-2 if name == "bfloat16" else 1e-4
    off = worst(arrays(state.parameters), arrays(wanted))
    if loss is not None:
        off = max(off, worst([np.asarray(out.loss)], [np.asarray(loss)]))
    parts = name in ("accumulate", "Average x8")
    if off <= bound:
        return "=", ""
    if parts and (case.draws or (case.keeps_statistics and name == "accumulate")) and np.isfinite(off):
        return "runs", ""
    return "WRONG", f"off by {off:.1e}"


def tested(case: Published, program: Any, test: Any) -> tuple[str, str]:
    """The test program learns nothing, and gives the loss that the step returns first."""
    state = ow.compile(program).init(begun(case))
    before = arrays(state.parameters)
    after, out = ow.compile(test)(state, *case.data)
    if worst(arrays(after.parameters), before):
        return "WRONG", "it changes its state"
    loss = case.step(*nnx.clone(case.state), *case.data) if is_modules(case) else None
    loss = loss if is_modules(case) else case.parts(case.step(*copied(case.state), *case.data))[1]
    off = 0.0 if loss is None else worst([np.asarray(out.loss)], [np.asarray(loss)])
    return ("=", "") if off < 1e-4 and np.isfinite(out.loss) else ("WRONG", f"loss off by {off:.1e}")


def copied(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state in arrays of its own, for some steps reuse what they are given."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)


def worst(mine: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference, by the size of the array in which it is."""
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        return np.inf
    sizes = (np.abs(y).max(initial=1e-2) for y in theirs)
    each = [np.abs(x - y).max(initial=0.0) / s for x, y, s in zip(mine, theirs, sizes, strict=True)]
    return float(np.max(each, initial=0.0))


def main(names: list[str]) -> None:
    """Print the table, and the sentences below it."""
    warnings.simplefilter("ignore")
    sentences: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    only = os.environ.get("TRANSFORMS", "").split(",") if os.environ.get("TRANSFORMS") else list(TRANSFORMS)
    print(f"{'':24}" + "".join(f"{name:>12}" for name in only), flush=True)
    for name in names or list(PUBLISHED):
        case = PUBLISHED[name]()
        program = ow.adopt(case.step, *case.state, *case.data)
        row = []
        for transform in only:
            outcome, sentence = cell(case, program, transform)
            row.append(outcome)
            counts[outcome] += 1
            if sentence:
                sentences.setdefault(sentence, []).append(f"{name} {transform}")
        print(f"{name:24}" + "".join(f"{outcome:>12}" for outcome in row), flush=True)
        for sentence, cells in sentences.items():
            print(f"    {', '.join(cells)}: {sentence}", flush=True)
        sentences = {}
        jax.clear_caches()
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
