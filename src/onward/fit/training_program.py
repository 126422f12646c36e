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
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.replicate import replicate
from onward.execute.layout import Layout
from onward.fit.model import Model


def training_program(
    model: Model,
    optimizer: Optimizer | Program | Pipeline,
    parameter_list: Iterable[Where] | None,
    devices: int | None,
    merge: Merge | None,
    check_finite: bool,
) -> Program:
    """The training Program that a Trainer runs, of a Pipeline that of its numbers; arguments as there.

    Raises:
        ArgumentError: the optimizer is none, the Program keeps other Variables than the model, or a Pipeline
            is to be changed.
    """
    if isinstance(optimizer, Pipeline):
        _expect_alone(parameter_list, devices, merge, check_finite)
        optimizer = optimizer.accumulated
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


def _expect_alone(
    parameter_list: Iterable[Where] | None, devices: int | None, merge: Merge | None, check_finite: bool
) -> None:
    """Raise ``ArgumentError`` for what comes too late for a Program that is cut into stages already."""
    given = {
        "parameter_list": parameter_list is not None,
        "devices": devices != 1,
        "merge": merge is not None,
        "check_finite": check_finite,
    }
    for word in (word for word, is_given in given.items() if is_given):
        raise ArgumentError(f"Trainer was given a Pipeline and {word}. {_INSTEAD[word]}")


_INSTEAD = {
    "parameter_list": "Say it before the cut: optimizer.minimize(model.topology, parameter_list=...).",
    "devices": "Stages have devices of their own: pipeline(..., data=2) for two each.",
    "merge": "JAX's partitioner sums the gradients of a stage. Leave it out.",
    "check_finite": (
        "It decides about a step as a whole, of which each stage sees a part. Leave it out: "
        "train(check=True), the default, raises where the loss was not finite."
    ),
}


def _minimized(
    model: Model, optimizer: Optimizer | Program, parameter_list: Iterable[Where] | None
) -> Program:
    if isinstance(optimizer, Program):
        if parameter_list is not None:
            raise ArgumentError(
                "Trainer was given a training Program and parameter_list, which that has chosen already. Say "
                "it there: optimizer.minimize(model.topology, parameter_list=...)."
            )
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"Trainer was given {describe(optimizer)} as the optimizer; expected one such as Adam(1e-3), or "
            "from_optax(optax.adam(1e-3))."
        )
    chosen = None if parameter_list is None else listed(parameter_list)
    return optimizer.minimize(model.topology, parameter_list=chosen)
