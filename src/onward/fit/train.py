"""The two-line way: ``optimize(cost)``, ``train(cost, reader=...)``.

>>> import numpy as np, onward as ow
>>> x = ow.data("images")
>>> l = ow.data("label")
>>> y = ow.layer.fc(x)
>>> cost = ow.layer.mse(y, l)
>>> ow.optimize(cost, ow.SGD(0.1))
>>> images = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
>>> trainer = ow.train(cost, reader=ow.batches((images, images.sum(1, keepdims=True)), 16), epochs=40)
>>> bool(trainer.history["loss"][-1] < 1e-3)
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

from onward.core.errors import ArgumentError, known_as, nearest
from onward.core.program import Program
from onward.core.structure import describe
from onward.define.deferred import Deferred
from onward.define.lazy import has_lazy
from onward.define.trace import trace
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers import Adam
from onward.develop.seam import forward_pass
from onward.distribute.merge import Merge
from onward.execute.checkpoint.checkpoints import Checkpoints, store_of
from onward.execute.checkpoint.identity import Identity
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.loop.reader import LoopReader
from onward.fit.evaluator import as_feed
from onward.fit.model import Model
from onward.fit.trainer import Trainer

_OPTIONS = ("parameter_list", "no_grad_set")
_optimizers: WeakKeyDictionary[Any, tuple[Optimizer, dict[str, Any]]] = WeakKeyDictionary()


def optimize(cost: Any, optimizer: Optimizer | None = None, **options: Any) -> None:
    """Say how a cost should be minimized when ``train`` is called for it.

    Args:
        cost: what a cost layer returned, a traced Program, or a function that declares what it needs.
        optimizer: Adam(1e-3) unless given.
        options: ``parameter_list`` and ``no_grad_set``, as for ``minimize``.

    Example:
        >>> import onward as ow
        >>> cost = ow.layer.mse(ow.layer.fc(ow.data("x")), ow.data("y"))
        >>> ow.optimize(cost, ow.Momentum(0.1, 0.9))
    """
    optimizer = optimizer if optimizer is not None else Adam(1e-3)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimize was given {describe(optimizer)}; expected an optimizer: Adam(1e-3).")
    if not (isinstance(cost, Program) or has_lazy(cost) or callable(cost)):
        raise ArgumentError(f"optimize was given {describe(cost)}; expected a cost, a Program or a function.")
    for name in options:
        if name not in _OPTIONS:
            raise ArgumentError(f"optimize has no argument {name!r}. {known_as(name, _OPTIONS)}")
    try:
        _optimizers[cost] = optimizer, options
    except TypeError:
        raise ArgumentError(
            f"optimize was given {describe(cost)}, which it cannot remember; expected a single cost. Or give "
            "the optimizer to train: train(cost, reader, optimizer=Adam(1e-3))."
        ) from None


def train(
    cost: Any,
    reader: Any,
    *,
    optimizer: Optimizer | None = None,
    epochs: int = 1,
    seed: int = 0,
    checkpoints: Checkpoints | str | PathLike[str] | None = None,
    resume: bool = False,
    strict: bool | None = None,
    devices: int | None = 1,
    merge: Merge | None = None,
    check_finite: bool = False,
    **options: Any,
) -> Trainer:
    """Train a cost on what a reader yields; shapes that were left open are those of the first batch.

    Args:
        cost: what a cost layer returned, a traced Program, or a function that declares what it needs; or a
            training Program that ``minimize``, ``accumulate`` or another transform made.
        reader: any iterable of batches, or a callable that returns one.
        optimizer: what ``optimize`` was told, or Adam(1e-3), unless given.
        epochs: how often to read the data; with ``resume``, in all.
        seed: what the parameters are initialized from.
        checkpoints: where, how often and how many to save.
        resume: continue from the latest checkpoint, if there is one. Without it a folder that holds another
            run is refused, before anything is computed.
        strict: what to do where that checkpoint is of another training; see ``Trainer.restore``.
        devices: how many devices to train on, each on its part of every batch; None for all, those of other
            processes too, without which none of several processes trains.
        merge: how their gradients become one; see ``replicate``.
        check_finite: raise ``NonFiniteError`` where a step is not finite, and name the op; see ``compile``.
        options: further arguments of ``Trainer.train``, such as ``test``, ``callbacks``, ``threads``.

    Returns:
        The Trainer: ``trainer.history``, ``trainer.model``, ``trainer.test(reader)``.

    Raises:
        CheckpointError: the folder holds another run and ``resume`` was not given, or another process writes
            to it. Nothing is changed then.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 2)), 1), ow.data("y", (None, 1)))
        >>> x = np.ones((8, 2), "float32")
        >>> ow.train(network, [(x, x[:, :1])], epochs=3).history["loss"].shape
        (3,)
    """
    store = store_of(checkpoints)
    with store or nullcontext():
        if store is not None:  # before anything is read or compiled
            store.claim(Identity.new(), resume=resume)
        chosen, given = _told(cost)
        chosen = optimizer or chosen
        first, reader = _peeked(reader)
        if isinstance(cost, Program) and cost.updates:
            forward, program = forward_pass(cost), cost
        else:
            forward = _forward(cost, first)
            program = uninterrupted(chosen.minimize)(forward, **given)
        trainer = Trainer(
            Model(forward, seed=seed),
            program,
            share=False,
            checkpoints=store,
            devices=devices,
            merge=merge,
            check_finite=check_finite,
        )
        if store is not None:
            trainer.identity = store.identity
            if resume and not store.is_empty():
                trainer.restore(fallback=True, strict=strict)
        trainer.train(reader, epochs=epochs, **options)
        return trainer


def _forward(cost: Any, first: Any) -> Program:
    """The forward Program of a cost, its open shapes as the first batch has them."""
    if isinstance(cost, Program):
        return cost
    if has_lazy(cost) and not callable(cost):
        deferred = Deferred(cost, {})
        return deferred.forward(_named(first, deferred.names))
    if not callable(cost):
        raise ArgumentError(f"train was given {describe(cost)}; expected a cost, a Program or a function.")
    return trace(cost, feed=first if isinstance(first, Mapping) else None)


def _named(first: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    """The first batch by name.

    Raises:
        ArgumentError: it lacks some data of the cost, or has some that the cost does not take.
    """
    fed = as_feed(first, names)
    if missing := [name for name in names if name not in fed]:
        unknown = [name for name in fed if name not in names]
        hint = f" It has {unknown[0]!r}. {nearest(unknown[0], names)}" if unknown else ""
        raise ArgumentError(f"The reader yielded a batch without {', '.join(map(repr, missing))}.{hint}")
    return fed


def _peeked(reader: Any) -> tuple[Any, Any]:
    """The first batch of a reader, and a reader that still yields it."""
    pairs = LoopReader(reader).epoch(0)
    first, _ = next(pairs)
    if isinstance(reader, Iterator):
        return first, chain([first], (batch for batch, _ in pairs))
    return first, reader


def _told(cost: Any) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer and the options that ``optimize`` was given for a cost; Adam(1e-3) if none."""
    try:
        return _optimizers.get(cost, (Adam(1e-3), {}))
    except TypeError:  # nothing that can be remembered
        return Adam(1e-3), {}
