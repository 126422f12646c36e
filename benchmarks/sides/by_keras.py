"""Keras on JAX: ``keras.Model``, ``compile``, ``train_on_batch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers

from benchmarks.models import Model, Params
from benchmarks.sides import Running
from benchmarks.workloads import EPSILON, FIRST_SUM, MOMENTUM, Workload

_OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "Momentum": lambda rate: optimizers.SGD(rate, momentum=MOMENTUM),
    "Adagrad": lambda rate: optimizers.Adagrad(rate, initial_accumulator_value=FIRST_SUM, epsilon=EPSILON),
    "Adam": lambda rate: optimizers.Adam(rate, epsilon=EPSILON),
}


def plain(work: Workload, model: Model) -> Running:
    """One batch after the other."""
    x, y = map(np.asarray, model.data)
    if work.kind == "lstm":
        x = x.swapaxes(0, 1)
    network = _NETWORKS[work.kind](x.shape[1:], model.params)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer=_OPTIMIZERS[work.optimizer](work.rate), loss=loss)
    return Running(lambda: network.train_on_batch(x, y))


def _mlp(shape: tuple[int, ...], params: Params) -> keras.Model:
    *hidden, last = params
    network = keras.Sequential(
        [keras.Input(shape), *(_dense(p, "relu") for p in hidden), _dense(last)],
    )
    return _filled(network, [p[name] for p in params for name in ("w", "b")])


def _residual_mlp(shape: tuple[int, ...], params: Params) -> keras.Model:
    x = given = keras.Input(shape)
    values = []
    for p in params["layers"]:
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([x, _dense(p["dense"], "relu")(h)])
        values += [p["norm"]["scale"], p["norm"]["shift"], p["dense"]["w"], p["dense"]["b"]]
    network = keras.Model(given, _dense(params["last"])(x))
    return _filled(network, [*values, params["last"]["w"], params["last"]["b"]])


def _cnn(shape: tuple[int, ...], params: Params) -> keras.Model:
    *convolutions, last = params
    parts: list[Any] = [keras.Input(shape)]
    for p in convolutions:
        *window, _, outputs = p["w"].shape
        parts += [layers.Conv2D(outputs, window, padding="same", activation="relu"), layers.MaxPooling2D()]
    network = keras.Sequential([*parts, layers.Flatten(), _dense(last)])
    return _filled(network, [p[name] for p in params for name in ("w", "b")])


def _lstm(shape: tuple[int, ...], params: Params) -> keras.Model:
    w, b = params["cell"].values()
    hidden = w.shape[1] // 4
    inputs = w.shape[0] - hidden
    forget = np.zeros(4 * hidden, np.float32)
    forget[hidden : 2 * hidden] = 1
    network = keras.Sequential([keras.Input(shape), layers.LSTM(hidden), _dense(params["last"])])
    return _filled(network, [w[:inputs], w[inputs:], b + forget, params["last"]["w"], params["last"]["b"]])


_NETWORKS = {"mlp": _mlp, "residual_mlp": _residual_mlp, "cnn": _cnn, "lstm": _lstm}


def _dense(p: Params, activation: str | None = None) -> layers.Dense:
    return layers.Dense(p["b"].size, activation)


def _filled(network: keras.Model, values: list[Any]) -> keras.Model:
    network.set_weights([np.asarray(value) for value in values])
    return network
