"""The devices of a stage share out its parameters, gradients and slots, and the numbers stay."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.test_pipeline import CLIPPED, MLP, NETWORKS, QUICK, WIDE, X, mlp, normal, trained

import onward as ow


def parts_of(state: Any) -> dict[str, tuple[int, ...]]:
    """The shape of what a device has of each state Variable, the same on all that have some."""
    shapes = {name: {part.data.shape for part in state[name].addressable_shards} for name in state}
    return {name: found.pop() for name, found in shapes.items() if len(found) == 1}


@pytest.mark.parametrize(
    ("network", "stages", "data", "schedule", "optimizer"),
    [
        ("gpt", 2, 2, "zero_bubble", CLIPPED),  # embedding and last layer are one parameter
        ("mixer", 4, 2, "gpipe", ow.Muon(0.02)),
        ("recurrent", 2, 4, "1f1b", ow.Adam(0.01, rules=[ow.EMA(0.5)])),
    ],
)
def test_twenty_steps_are_those_of_one_device(
    network: str, stages: int, data: int, schedule: str, optimizer: Any
):
    function, params, x = NETWORKS[network]
    x = np.concatenate([x, x])
    with jax.enable_x64(True):
        program = optimizer.minimize(function, params, x, has_aux=True)
        state, out = trained(ow.compile(program), params, x, 20)
        cut = ow.pipeline(program, stages, 4, schedule, data=data, sharded=True)
        piped, seen = trained(ow.compile(cut, options=QUICK), params, x, 20)
        for name in state:
            np.testing.assert_allclose(piped[name], state[name], rtol=0, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(seen.loss, out.loss, rtol=0, atol=1e-9)
        held = parts_of(piped)
        assert held.keys() == set(state)
        for v in program.state:
            dividing = [i for i, n in enumerate(v.shape) if n % data == 0]
            axis = max(dividing, key=lambda i: (v.shape[i], -i), default=None)
            wanted = [n // data if i == axis else n for i, n in enumerate(v.shape)]
            assert held[v.name] == tuple(wanted), v


def odd(params: Any, x: Any) -> Any:
    return mlp(params["layers"], x * params["scale"] + jnp.mean(params["three"]))


def test_a_part_gathers_each_parameter_once_and_what_data_does_not_divide_is_whole():
    params = {"layers": MLP, "scale": np.ones((), "float32"), "three": np.ones(3, "float32")}
    program = ow.Momentum(0.1).minimize(odd, params, X)
    cut = ow.pipeline(program, 3, 3, data=2, sharded=True)
    told = str(cut)
    assert "each keeps a share of its parameters, gradients and other state" in told
    assert "16 B of parameters are whole on each of them: 2 divides no dimension of these" in told
    assert "divides no dimension" not in str(ow.pipeline(program, 3, 3, data=2))
    step = ow.compile(cut)
    for stage in range(3):
        text = step.stages.parts[stage, "F"].call.as_text()
        gathers = re.findall(r" all-gather(?:-start)?\(", text)
        assert len(gathers) == sum(v.ndim == 2 for v in cut.parts[stage, "F"].state) == 1
    state, out = step(step.init(params), X)
    plain = ow.compile(program)
    wanted, seen = plain(plain.init(params), X)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-6)
    for name in state:
        np.testing.assert_allclose(state[name], wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
    held = parts_of(state)
    assert (held["layers/1"], held["layers/1/velocity"]) == ((2, WIDE), (2, WIDE))
    assert (held["scale"], held["three"], held["three/velocity"]) == ((), (3,), (3,))


def test_parameters_in_a_low_precision_are_kept_in_parts_too():
    program = ow.mixed_precision(ow.SGD(0.1).minimize(mlp, MLP, X))
    cut = ow.pipeline(program, 3, 3, data=2, sharded=True)
    step = ow.compile(cut, options=QUICK)
    casts = [v for part in cut.once.values() for v in part.outputs if v.shape == (WIDE, WIDE)]
    assert [v.dtype for v in casts] == [jnp.bfloat16] * 2  # the first is read where it is made
    for stage, part in cut.once.items():
        for v in set(part.outputs) & {*casts}:
            assert step.stages.lies(v, stage).shard_shape(v.shape) == (2, WIDE)
    plain = ow.compile(ow.accumulate(program, 3), options=QUICK)
    state, wanted = trained(step, MLP, X, 3)[0], trained(plain, MLP, X, 3)[0]
    for name in state:
        np.testing.assert_allclose(state[name], wanted[name], rtol=0.02, atol=1e-3, err_msg=name)


def test_a_checkpoint_of_any_layout_is_restored_in_parts():
    program = ow.Momentum(0.1).minimize(mlp, MLP, X)
    plain = ow.compile(ow.pipeline(program, 2, 3), options=QUICK)
    shared = ow.compile(ow.pipeline(program, 2, 3, data=2, sharded=True), options=QUICK)
    state, _ = trained(shared, MLP, X, 2)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(state, 2)
    for restored in (plain.restore(path), shared.restore(path)):
        assert all(np.array_equal(restored[name], state[name]) for name in state)
    assert parts_of(restored)["params/2/velocity"] == (2, WIDE)
    moved, _ = shared(plain.restore(path), X)  # a State of other devices is taken over
    state, _ = shared(state, X)
    assert all(np.array_equal(moved[name], state[name]) for name in state)
    assert parts_of(moved) == parts_of(state)


def test_sharing_with_nobody_is_refused():
    program = ow.SGD(0.1).minimize(mlp, MLP, X)
    with pytest.raises(ow.ArgumentError, match="each stage has one device. Say with how many.*data=2"):
        ow.pipeline(program, 2, 3, sharded=True)
    with pytest.raises(ow.ArgumentError, match="sharded is 'yes'; expected True or False"):
        ow.pipeline(program, 2, 3, data=2, sharded="yes")  # type: ignore[arg-type]
    deep = [normal(WIDE, WIDE) for _ in range(12)]
    rolled = ow.roll(ow.SGD(0.1).minimize(mlp, deep, X))
    with pytest.raises(ow.ArgumentError, match="keep their parameters stacked and whole.*Leave roll out"):
        ow.pipeline(rolled, 2, 3, data=2, sharded=True)
