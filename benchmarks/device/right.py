"""Is what the device computes what float64 on the host computes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import onward as ow
from benchmarks.device import functions
from benchmarks.device.part import Cells, Column, Part, Sheet, reason_of
from benchmarks.device.precision import FEW, MANY, ROUNDOFF, bound, error, product_precision
from onward.core.words import UpdateType

_STEPS, _RATE = 3, 0.05
Pairs = Iterable[tuple[str, Any, Any, float]]  # name, found, expected, and what they may be apart anyway


@contextmanager
def host_float64() -> Iterator[None]:
    """Within, arrays are float64 and JAX computes on the host."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def wide(tree: Any) -> Any:
    """The floats of a tree in float64."""

    def widened(leaf: Any) -> Any:
        is_float = jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)
        return np.asarray(leaf, np.float64) if is_float else leaf

    return jax.tree.map(widened, tree)


def narrow(tree: Any) -> Any:
    """The floats of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tree)


class _Table:
    """What was compared for one row, and the worst of it."""

    def __init__(self, sheet: Sheet, what: str, kind: str) -> None:
        self._sheet, self._what, self._kind = sheet, what, kind
        self._compared, self._unequal = 0, 0
        self._worst: tuple[float, str] = (0.0, "")

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._compared:
            worst, name = self._worst
            self._sheet.row(
                what=self._what,
                computed=self._kind,
                compared=self._compared,
                unequal=self._unequal,
                worst=worst if np.isfinite(worst) else None,
                where=name,
            )

    def hold(self, limit: float, find: Callable[[], Pairs], name: str = "") -> None:
        """Compare what is found with what is expected; what raises is unequal."""
        try:
            for part, found, expected, slack in find():
                self._count(f"{name} {part}".strip(), error(found, expected, slack) / limit)
        except Exception as problem:
            self._count(name, float("inf"))
            self._sheet.leave_out(f"{self._what}, {name}" if name else self._what, reason_of(problem))

    def _count(self, name: str, over: float) -> None:
        self._compared += 1
        self._unequal += not over <= 1
        self._worst = max(self._worst, (over, name))


# ---------------------------------------------------------------------------------------------- gradients


def _gradients(sheet: Sheet) -> None:
    """Each family once: the gradients of all its functions, beside jax.grad in float64."""
    for name, family in functions.FAMILIES.items():
        family = dict(list(family.items())[:2]) if sheet.rounds <= 2 else family
        multiplies = name in functions.MULTIPLY
        with _Table(sheet, f"gradients, {name}", _kind(multiplies)) as table:
            limit = bound(FEW, multiplies)
            table.hold(limit, lambda family=family: _derived(family))


def _derived(family: Mapping[str, functions.Case]) -> Pairs:
    loss, given = functions.loss_of(family), {name: case[1] for name, case in family.items()}
    program = ow.append_backward(ow.trace(loss, narrow(given)))
    step = ow.compile(program, fetch=[gradient for _, gradient in program.gradients])
    _, out = step(step.init(narrow(given)))
    with host_float64():
        expected = jax.tree.leaves(jax.jit(jax.grad(loss))(given))
    for (parameter, gradient), value in zip(program.gradients, expected, strict=True):
        yield parameter.name, out[gradient.name], value, 0.0


# ------------------------------------------------------------------------------------- networks, transforms


def network(params: Any, x: Array, y: Array) -> Array:
    """Six equal layers around a sum, between two others; the mean of squared differences."""
    h = jnp.tanh(x @ params["first"])
    for layer in params["layers"]:
        h = h + jnp.tanh(h @ layer["w"] + layer["b"])
    return jnp.mean((h @ params["last"] - y) ** 2)


def network_of(examples: int) -> tuple[Any, tuple[Any, ...]]:
    """Its parameters and a batch, in float64, of numbers that float32 holds."""
    random = np.random.default_rng(1)

    def drawn(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32).astype(np.float64)

    layers = [{"w": drawn(16, 16), "b": np.zeros(16)} for _ in range(6)]
    params = {"first": drawn(8, 16), "layers": layers, "last": drawn(16, 2)}
    return params, (drawn(examples, 8), drawn(examples, 2))


def descended(loss: Callable[..., Array], params: Any, data: tuple[Any, ...]) -> tuple[list[float], Any]:
    """Losses and parameters of three steps along the gradient, by jax.value_and_grad in float64."""
    with host_float64():
        find, losses = jax.jit(jax.value_and_grad(loss)), []
        for _ in range(_STEPS):
            value, gradient = find(params, *data)
            losses.append(float(value))
            params = jax.tree.map(lambda w, g: w - _RATE * g, params, gradient)
        return losses, jax.tree.map(np.asarray, params)


def trained(program: ow.Program, params: Any, data: tuple[Any, ...], **options: Any) -> tuple[Any, Any]:
    """The same by a step of Onward."""
    step = ow.compile(program, **options)
    state, losses = step.init(params), []
    for _ in range(_STEPS):
        state, out = step(state, *data)
        losses.append(float(out.loss))
    return losses, state.parameters


def moved(found: tuple[Any, Any], expected: tuple[Any, Any], before: Any) -> Pairs:
    """Losses, and how far each parameter went, beside the rounding of where it is."""
    yield "loss", found[0], expected[0], 0.0
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    trees = (jax.tree.leaves(tree) for tree in (found[1], expected[1], before))
    for name, a, b, start in zip(names, *trees, strict=True):
        rounding = _STEPS * ROUNDOFF["float32"] * np.abs(start).max(initial=0.0)
        yield name, np.asarray(a, np.float64) - start, b - np.asarray(start, np.float64), rounding


_TRANSFORMS: dict[str, tuple[str, Callable[[ow.Program], ow.Program], dict[str, Any]]] = {
    "as it is": ("float32", lambda p: p, {}),
    "tune=False": ("float32", lambda p: p, {"tune": False}),
    "roll": ("float32", ow.roll, {}),
    "fence": ("float32", ow.fence, {}),
    "recompute": ("float32", lambda p: ow.recompute(p, 0.8), {}),
    "roll, recompute": ("float32", lambda p: ow.recompute(ow.roll(p), 0.8), {}),
    "guard": ("float32", ow.guard, {}),
    "check_finite": ("float32", lambda p: p, {"check_finite": True}),
    "accumulate": ("float32", lambda p: ow.accumulate(p, 2), {}),
    "bfloat16": ("bfloat16", lambda p: ow.mixed_precision(p, "bfloat16"), {}),
    "float16": ("float16", lambda p: ow.mixed_precision(p, "float16", scale=2.0**7), {}),
    "bfloat16, roll": ("bfloat16", lambda p: ow.roll(ow.mixed_precision(p, "bfloat16")), {}),
}
_A_FEW = ("as it is", "roll")


def _networks(sheet: Sheet) -> None:
    """One network under every transform."""
    params, data = network_of(64)
    expected, program = descended(network, params, data), _minimized(network, params, data)
    for name, (dtype, transform, options) in _TRANSFORMS.items():
        if sheet.rounds <= 2 and name not in _A_FEW:
            continue

        def find(transform: Any = transform, options: Any = options) -> Pairs:
            found = trained(transform(program), narrow(params), narrow(data), **options)
            return moved(found, expected, params)

        with _Table(sheet, f"network, {name}", _kind(True, dtype)) as table:
            table.hold(_network_bound(dtype), find)


def _minimized(loss: Callable[..., Array], params: Any, data: tuple[Any, ...]) -> ow.Program:
    return ow.SGD(_RATE).minimize(loss, narrow(params), *narrow(data))


def _network_bound(dtype: str = "float32") -> float:
    """Sixteen bits are few for as many roundings as float32 may be off by: they add up at random."""
    coarse = dtype != "float32" or product_precision() != "float32"
    return bound(FEW // 4 if coarse else MANY, True, dtype)


# ------------------------------------------------------------------------------------------------- devices


def _devices(sheet: Sheet) -> None:
    """The same network on all devices, merged in each exact way, in both ways of running it."""
    count = jax.device_count()
    params, data = network_of(4 * count)
    expected, program = descended(network, params, data), _minimized(network, params, data)
    merges = {"average": ow.Average(), "bucketed": ow.merge.Bucketed(), "sharded": ow.Sharded()}
    ways = {(merge, by): merges[merge] for merge in merges for by in ("shard_map", "pmap")}
    for (name, by), merge in list(ways.items())[: 1 if sheet.rounds <= 2 else None]:

        def find(merge: Any = merge, by: str = by) -> Pairs:
            spread = ow.replicate(program, count, merge)
            return moved(trained(spread, narrow(params), narrow(data), by=by), expected, params)

        with _Table(sheet, f"{count} device{'s' * (count > 1)}, {name}, {by}", _kind(True)) as table:
            table.hold(_network_bound(), find)


# ---------------------------------------------------------------------------------------------- optimizers


def optimizers() -> dict[str, type[ow.Optimizer]]:
    """Every optimizer that Onward has, by name."""
    return {name: getattr(ow.optimizer, name) for name in ow.optimizer.__all__}


_DRAWING = {"PSGDKron": "it draws at random, and draws other numbers in float64"}


def bowl(params: Any, goal: Any) -> Array:
    """A loss without products, whose gradients are nowhere near zero."""
    return sum(jnp.sum((w - g) ** 2 / 2) for w, g in zip(params.values(), goal.values(), strict=True))


def _optimizers(sheet: Sheet) -> None:
    """One step of each, beside the same rule in float64 on the host."""
    random = np.random.default_rng(2)
    shapes = {"vector": (5,), "matrix": (6, 4), "kernel": (2, 2, 3, 4)}
    goal = {name: random.uniform(0.2, 1.0, shape) for name, shape in shapes.items()}
    goal = wide(narrow(goal))
    params = {name: np.full(shape, 0.125) for name, shape in shapes.items()}
    kinds = {name: kind for name, kind in optimizers().items() if name not in _DRAWING}
    kinds = dict(list(kinds.items())[: 1 if sheet.rounds <= 2 else None])
    for name, reason in _DRAWING.items():
        sheet.leave_out(f"optimizers, {name}", reason)
    for matrices in (False, True):
        with _Table(sheet, f"optimizers{', of matrices' * matrices}", _kind(matrices)) as table:
            for name, kind in kinds.items():
                if (kind.type is UpdateType.PER_MATRIX) is matrices:
                    limit = bound(16 * MANY if matrices else MANY, False)
                    table.hold(limit, lambda kind=kind: _stepped(kind, params, goal), name)


def _stepped(kind: type[ow.Optimizer], params: Any, goal: Any) -> Pairs:
    with jax.default_matmul_precision("highest"):
        found = _after_a_step(kind, narrow(params), narrow(goal))
        with host_float64():
            expected = jax.tree.map(np.asarray, _after_a_step(kind, params, goal))
    return moved(found, expected, params)


def _after_a_step(kind: type[ow.Optimizer], params: Any, goal: Any) -> tuple[Any, Any]:
    step = ow.compile(kind().minimize(bowl, params, goal))
    state, out = step(step.init(params), goal)
    return out.loss, state.parameters


# ------------------------------------------------------------------------------------------- foreign models


def _foreign(sheet: Sheet) -> None:
    """Models of other libraries, three steps each."""
    for name, file in _FOREIGN.items():
        if find_spec(name.split(".")[0]) is None:
            sheet.leave_out(name, "not installed: pip install -e '.[bench]'")
            continue

        def find(file: str = file) -> Pairs:
            loss, params = import_module(f"benchmarks.device.foreign.{file}").made()
            params, data = wide(params), network_of(8)[1]
            found = trained(_minimized(loss, params, data), narrow(params), narrow(data))
            return moved(found, descended(loss, params, data), params)

        with _Table(sheet, f"model of {name}", _kind(True)) as table:
            table.hold(_network_bound(), find)


_FOREIGN = {"flax.linen": "by_linen", "flax.nnx": "by_nnx", "equinox": "by_equinox"}


# -------------------------------------------------------------------------------------------------- the part


def _kind(multiplies: bool, dtype: str = "float32") -> str:
    """In which formats it is computed."""
    product = product_precision()
    return dtype if not multiplies or dtype == product or dtype != "float32" else f"{dtype}, {product}"


def closing(rows: list[Cells]) -> list[str]:
    """How much was compared, and how much of it is unequal."""
    compared, unequal = (sum(row[key] for row in rows) for key in ("compared", "unequal"))
    return [f"{compared} compared, {unequal} unequal"]


def is_bad(rows: list[Cells]) -> bool:
    """Whether anything is unequal, or nothing was compared."""
    return not rows or any(row["unequal"] for row in rows)


PART = Part(
    name="right",
    question="is it what float64 on the host computes?",
    columns=(
        Column("what", "what"),
        Column("computed in", "computed"),
        Column("compared", "compared"),
        Column("unequal", "unequal"),
        Column("worst error / bound", "worst", "{:.3f}".format),
        Column("of", "where"),
    ),
    cases={
        "gradients": _gradients,
        "networks": _networks,
        "devices": _devices,
        "optimizers": _optimizers,
        "models of other libraries": _foreign,
    },
    share=4,
    legend=(
        f"bound: over the largest number expected, {FEW} roundings of a function, {MANY} of three steps of a "
        f"network\nor of an optimizer, {FEW // 4} where products are rounded to 11 bits or fewer; a rounding "
        "is 2^-24 in float32,\n2^-11 in TensorFloat-32 and float16, 2^-8 in bfloat16. Optimizers multiply in "
        f"float32; of matrices {16 * MANY} roundings."
    ),
    closing=closing,
    is_bad=is_bad,
)
