"""A warning names the generator of a reader whose state no checkpoint keeps."""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.loop.generators import untold_generator

X = np.ones((4, 2), "float32")
RNG = np.random.RandomState(0)


class Shuffler:
    """A reader of its own, with a generator."""

    def __init__(self, rng: Any) -> None:
        self.size, self.rng = 2, rng

    def __iter__(self) -> Any:
        for rows in np.split(np.random.default_rng(0).permutation(4), 2):
            yield (X[rows],)


class Remembering(Shuffler):
    """One that says how far it is."""

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class ToldTheEpoch(Shuffler):
    """One that begins anew in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.rng = np.random.default_rng(epoch)


def closed_over() -> Any:
    rng = random.Random(0)
    return lambda: [(X[: rng.randint(1, 4)],)]


def of_the_module() -> Any:
    return [(X[RNG.permutation(4)],)]


class Rows:
    """A reader whose methods draw from the generators of modules."""

    def __iter__(self) -> Any:
        return iter([(X[np.random.permutation(4)],)])

    def read(self) -> Any:
        return [(X[RNG.permutation(4)],)]


def by_default(rows: int, rng: Any = RNG) -> Any:
    return [(X[rng.permutation(rows)],)]


def inside() -> Any:
    def drawn() -> Any:
        order = list(range(4))
        random.shuffle(order)
        yield (X[order],)

    return list(drawn())


def anew(epoch: int) -> Any:
    np.random.seed(epoch)
    return [(X[np.random.permutation(4)],)]


def of_the_same_name(epoch: int) -> Any:
    class Settings:
        RNG = 3

    return [(X[: Settings.RNG],)]


def assigned_later() -> Any:
    def read() -> Any:
        return [(X[: len(later)],)]

    yield read
    later = [1]


class Broken:
    """An object that cannot be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (Shuffler(np.random.default_rng(0)), "rng"),
        (Shuffler(random.Random(0)), "rng"),
        (closed_over(), "rng"),
        (of_the_module, "RNG"),
        (lambda: np.random.permutation(4), "np.random.permutation"),
        (Rows(), "np.random.permutation"),
        (Rows().read, "RNG"),
        (Shuffler(RNG).__iter__, "rng"),
        (inside, "random.shuffle"),
        (by_default, "rng"),
        (partial(by_default, 4), "rng"),
        (partial(lambda rows, order: order.permutation(rows), 4, RNG), "order"),
        (anew, ""),
        (of_the_same_name, ""),
        (next(assigned_later()), ""),
        (Shuffler(Broken()), ""),
        (Shuffler(None), ""),
        (Remembering(np.random.default_rng(0)), ""),
        (ToldTheEpoch(np.random.default_rng(0)), ""),
        (ow.batches((X,), 2, shuffle=True), ""),
        (lambda epoch: [(X[np.random.default_rng(epoch).permutation(4)],)], ""),
        ([(X,)], ""),
    ],
)
def test_generators_that_nothing_tells_of_are_found(reader: Any, name: str) -> None:
    assert untold_generator(reader) == name


def test_they_are_named_once_where_there_are_checkpoints_and_in_what_is_resumed(tmp_path: Path) -> None:
    def trainer(**options: Any) -> ow.Trainer:
        w = jnp.zeros(2)
        return ow.Trainer(ow.Model(ow.trace(lambda w, x: jnp.mean(x @ w), w, X), w), ow.SGD(0.1), **options)

    reader = Shuffler(np.random.default_rng(0))
    with pytest.warns(UserWarning, match=r"a random generator, rng, and has no state_dict") as told:
        trainer(checkpoints=tmp_path).train(reader, epochs=2, progress=False)
    assert len(told) == 1
    again = trainer()
    again.restore(tmp_path)
    with pytest.warns(UserWarning, match="a random generator"):
        again.train(reader, epochs=3, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer().train(reader, progress=False)
