"""The training Program of a Trainer: made of what it was given, and compared with what its Model keeps."""

from __future__ import annotations

from collections.abc import Iterable

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.core.structure import describe
from onward.core.walk import Where, listed
from onward.derive.optimizer import Optimizer
from onward.develop.check_finite import check_finite as checked
from onward.distribute.merge import Merge
from onward.distribute.replicate import replicate
from onward.execute.layout import Layout
from onward.fit.model import Model


def training_program(
    model: Model,
    optimizer: Optimizer | Program,
    parameter_list: Iterable[Where] | None,
    devices: int | None,
    merge: Merge | None,
    check_finite: bool,
) -> Program:
    """The training Program that a Trainer runs; the arguments are the Trainer's.

    Raises:
        ArgumentError: the optimizer is none, or the Program keeps other Variables than the model.
    """
    program = _minimized(model, optimizer, parameter_list)
    if devices != 1 or merge is not None:
        program = replicate(program, devices, merge)
    program = checked(program) if check_finite else program
    expect_same(model.state.layout, Layout.of(program))
    return program


def expect_same(model: Layout, training: Layout) -> None:
    """Raise ``ArgumentError`` unless a training Program keeps all that the model does, of the same types."""
    kept = {v.name: v for v in training.variables}
    for v in model.variables:
        found = kept.get(v.name)
        if found is None or (found.shape, found.dtype) != (v.shape, v.dtype):
            what = "nothing of that name" if found is None else found.type
            raise ArgumentError(
                f"The model keeps {v.name!r} ({v.type}), and the training Program keeps {what}. Make it of "
                "the model's own network: optimizer.minimize(model.topology)."
            )


def _minimized(
    model: Model, optimizer: Optimizer | Program, parameter_list: Iterable[Where] | None
) -> Program:
    if isinstance(optimizer, Program):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"Trainer was given {describe(optimizer)} as the optimizer; expected one such as Adam(1e-3), or "
            "from_optax(optax.adam(1e-3))."
        )
    chosen = None if parameter_list is None else listed(parameter_list)
    return optimizer.minimize(model.topology, parameter_list=chosen)
