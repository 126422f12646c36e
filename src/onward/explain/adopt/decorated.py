"""An adopted step as a function that is called as before: the same arguments, the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import jax

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, OutOfMemoryError, TraceError
from onward.core.lower import lower
from onward.core.program import Program
from onward.core.structure import Static
from onward.define.arguments import type_of
from onward.execute.memory.exhausted import is_exhausted, out_of_memory, wait_for
from onward.execute.tuning import Tuning
from onward.explain.adopt.step import AdoptedStep
from onward.explain.inspect.call import holds_modules

Adopting = Callable[[tuple[Any, ...], dict[str, Any]], tuple[AdoptedStep, Program]]


def called_as_before(step: Callable[..., Any], adopting: Adopting) -> Callable[..., Any]:
    """The function that ``adopt`` makes of a step which is not called yet.

    Args:
        step: the training step.
        adopting: from its arguments to the adopted step and its Program.

    Raises:
        ArgumentError: modules of flax.nnx, which a step changes in place.
        OutOfMemoryError: a device has not the memory for a call.
    """
    calls = _Calls(step, adopting)

    def called(*args: Any, **kwargs: Any) -> Any:
        if calls.at_once is None and calls.arrays_alone:
            calls.begin(args, kwargs)
        if calls.at_once is None:
            return calls(args, kwargs)
        try:
            return calls.at_once(*args, **kwargs)
        except (TypeError, TraceError):
            returned = calls(args, kwargs)
            calls.at_once, calls.arrays_alone = None, False
            return returned

    @wraps(step)
    def adopted(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = called(*args, **kwargs)
            if not calls.have_run and not _is_traced(returned):
                wait_for(returned)
                calls.have_run = True
            return returned
        except RuntimeError as error:
            if is_exhausted(error):
                raise calls.out_of_memory(error, args, kwargs) from error
            raise

    return adopted


class _Calls:
    """The calls of a step: at once where all it is given are arrays, as a jitted function takes them.

    Otherwise what is not an array is fixed: the step is compiled for each of these values. Of Python numbers
    those are fixed that the step looks at: the arguments themselves, and only then what lies in containers,
    as the number of steps does that some states begin with.
    """

    def __init__(self, step: Callable[..., Any], adopting: Adopting) -> None:
        self.step, self.adopting = step, adopting
        self.at_once: Callable[..., Any] | None = None
        self.arrays_alone = True
        self.have_run = False
        self.known: dict[Any, Callable[..., Any]] = {}
        self.looked_at: dict[Any, tuple[int, tuple[int, ...]]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step, compiled for these arguments."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        fed = self.fed(leaves, treedef)
        fixed = tuple((type(x), x) for x, is_fed in zip(leaves, fed, strict=True) if not is_fed)
        call = self.known.get((treedef, fed, fixed))
        if call is None:
            _expect_no_modules((*args, *kwargs.values()))
            donated = _donated(self.step, args, kwargs, sum(fed))
            call = _Compiled(self.adopting, leaves, fed, treedef, donated or ())
            self.known[treedef, fed, fixed] = call
        try:
            return call(*(x for x, is_fed in zip(leaves, fed, strict=True) if is_fed))
        except TraceError:
            depths = tuple(len(path) for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs)))
            pairs = zip(leaves, depths, strict=True)
            depth, _ = self.looked_at.get(treedef, (0, ()))
            if not (deeper := [n for x, n in pairs if _is_number(x) and n > depth]):
                raise
            self.looked_at[treedef] = min(deeper), depths  # it looks at a number, as at a static argument
            return self(args, kwargs)

    def fed(self, leaves: Sequence[Any], treedef: Any) -> tuple[bool, ...]:
        """Which leaves of the arguments are arrays to the step, or numbers that it does not look at."""
        depth, depths = self.looked_at.get(treedef, (0, ()))
        if not depth:
            return tuple(map(_is_array, leaves))
        pairs = zip(leaves, depths, strict=True)
        return tuple(_is_array(x) and not (_is_number(x) and n <= depth) for x, n in pairs)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Get ready to call the step at once, if it is given arrays alone."""
        _expect_no_modules((*args, *kwargs.values()))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        donated = _donated(self.step, args, kwargs, len(leaves)) if all(map(_is_array, leaves)) else None
        self.arrays_alone = donated is not None
        if donated is None:
            return
        given, named = jax.tree.unflatten(treedef, [i in donated for i in range(len(leaves))])
        self.at_once = compiled_alone(
            self.run,
            donate_argnums=tuple(i for i, flags in enumerate(given) if any(jax.tree.leaves(flags))),
            donate_argnames=tuple(name for name, flags in named.items() if any(jax.tree.leaves(flags))),
        )

    def out_of_memory(
        self, error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OutOfMemoryError:
        """The error to raise where memory was not enough for a call."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        pairs = zip(leaves, self.fed(leaves, treedef), strict=True)
        types = [_type(x) if is_fed else x for x, is_fed in pairs]
        _, program = self.adopting(*jax.tree.unflatten(treedef, types))
        return out_of_memory(error, Tuning()(program, ()).program, arrays=leaves)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The step by its Program, on traced arrays."""
        _expect_no_modules((*args, *kwargs.values()))
        leaves, treedef = jax.tree.flatten((args, kwargs))
        step, program = self.adopting(*jax.tree.unflatten(treedef, map(_type, leaves)))
        arrays = iter(_stepped(step, Tuning()(program, ()).program, leaves))
        results = [next(arrays) if static is None else static.value for static in step.statics]
        return jax.tree.unflatten(step.treedef, results)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) or type_of(value) is not None


def _is_traced(returned: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(returned))


def _expect_no_modules(arguments: Sequence[Any]) -> None:
    if any(map(holds_modules, arguments)):
        raise ArgumentError(
            "An adopted step was given modules of flax.nnx, which it would change in place. Take the "
            "Program: adopt(step, model, optimizer, batch), compile it, and begin with "
            "step.init(nnx.split((model, optimizer))[1])."
        )


def _donated(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> tuple[int, ...] | None:
    """Which of the arrays a jitted step reuses; None if it takes some of them for static arguments."""
    if isinstance(step, MethodType):
        step, args = step.__func__, (step.__self__, *args)
    try:
        told = jax.tree.leaves(step.trace(*args, **kwargs).args_info, is_leaf=lambda x: hasattr(x, "donated"))
    except (AttributeError, TypeError, ValueError):
        return ()
    return tuple(i for i, info in enumerate(told) if info.donated) if len(told) == count else None


class _Compiled:
    """The step on the arrays among its arguments alone, compiled once for each of their types."""

    def __init__(
        self,
        adopting: Adopting,
        leaves: Sequence[Any],
        fed: Sequence[bool],
        treedef: Any,
        donated: tuple[int, ...],
    ) -> None:
        self.adopting, self.fed, self.treedef = adopting, fed, treedef
        self.fixed = [None if is_fed else x for x, is_fed in zip(leaves, fed, strict=True)]
        self.result: tuple[Any, Sequence[Static | None]] = None, ()
        self.jitted = compiled_alone(self.run, donate_argnums=donated)

    def __call__(self, *arrays: Any) -> Any:
        """Run it; returns the containers of the step."""
        supply = iter(self.jitted(*arrays))
        treedef, statics = self.result
        leaves = [next(supply) if static is None else static.value for static in statics]
        return jax.tree.unflatten(treedef, leaves)

    def run(self, *arrays: Any) -> list[Any]:
        """The arrays that the step returns, by its Program."""
        supply = iter(arrays)
        values = [next(supply) if is_fed else x for x, is_fed in zip(self.fixed, self.fed, strict=True)]
        types = [_type(x) if is_fed else x for x, is_fed in zip(values, self.fed, strict=True)]
        step, program = self.adopting(*jax.tree.unflatten(self.treedef, types))
        self.result = step.treedef, step.statics
        return _stepped(step, Tuning()(program, ()).program, values)


def _type(value: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(value)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _stepped(step: AdoptedStep, program: Program, values: Sequence[Any]) -> list[Any]:
    """The arrays that the step returns for these leaves of its arguments."""
    state, data = step.parted(values)
    following = [program.next_state.get(v, v) for v in program.state]
    assert program.signature is not None
    results = program.signature.result.variables
    found = lower(program, [*following, *results], at_once=True)(state, data)
    return step.returned(found[: len(following)], found[len(following) :])
