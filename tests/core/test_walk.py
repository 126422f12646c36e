"""Walks over a Program small enough to know every answer by heart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

V = np.arange(1, 4, dtype=np.float32)


def diamond(params, x, unused):
    """w and x meet in mul; sin and cos both read it; add joins them; b is added last."""
    product = params["w"] * x
    return jnp.sum(jnp.sin(product) + jnp.cos(product)) + params["b"]


PARAMETERS = {"w": V, "b": np.float32(1)}
PROGRAM = ow.trace(diamond, PARAMETERS, V, V)
TRAINED = ow.Momentum(0.1, 0.9).minimize(diamond, PARAMETERS, V, V)


def names(variables):
    return {v.name for v in variables}


def types(program):
    return [op.type for op in program.ops]


def test_the_program_is_the_one_the_tests_speak_of():
    assert types(PROGRAM) == ["mul", "sin", "cos", "add", "reduce_sum", "add"]
    assert list(PROGRAM.variables) == [
        "x", "unused", "b", "w", "mul", "sin", "cos", "add", "reduce_sum", "add_1",
    ]  # fmt: skip


ANCESTORS = {
    "w": {"w"},
    "mul": {"mul", "w", "x"},
    "sin": {"sin", "mul", "w", "x"},
    "add": {"add", "sin", "cos", "mul", "w", "x"},
    "add_1": {"add_1", "reduce_sum", "add", "sin", "cos", "mul", "w", "x", "b"},
}

DESCENDANTS = {
    "unused": {"unused"},
    "b": {"b", "add_1"},
    "cos": {"cos", "add", "reduce_sum", "add_1"},
    "w": {"w", "mul", "sin", "cos", "add", "reduce_sum", "add_1"},
}


@pytest.mark.parametrize("target", ANCESTORS)
def test_ancestors(target):
    assert names(ow.graph.ancestors(PROGRAM, [PROGRAM[target]])) == ANCESTORS[target]


@pytest.mark.parametrize("source", DESCENDANTS)
def test_descendants(source):
    assert names(ow.graph.descendants(PROGRAM, [PROGRAM[source]])) == DESCENDANTS[source]


def test_ancestors_of_several_are_those_of_each():
    both = ow.graph.ancestors(PROGRAM, [PROGRAM["sin"], PROGRAM["b"]])
    assert names(both) == ANCESTORS["sin"] | {"b"}


def test_producers_and_consumers():
    made, read = ow.graph.producers(PROGRAM), ow.graph.consumers(PROGRAM)
    assert {v.name: op.type for v, op in made.items()}["add_1"] == "add"
    assert PROGRAM["w"] not in made
    assert [op.type for op in read[PROGRAM["mul"]]] == ["sin", "cos"]
    assert PROGRAM["add_1"] not in read
    assert PROGRAM["unused"] not in read


def test_liveness_by_hand():
    assert [names(alive) for alive in ow.graph.liveness(PROGRAM)] == [
        {"mul"},
        {"mul", "sin"},
        {"sin", "cos"},
        {"add"},
        {"reduce_sum"},
        {"add_1"},
    ]


def test_what_an_op_writes_and_nobody_reads_is_alive_once():
    program = ow.trace(lambda w: (jnp.sin(w), jnp.sum(jnp.exp(w)))[0], V)
    assert [names(alive) for alive in ow.graph.liveness(program)] == [
        {"sin"},
        {"sin", "exp"},
        {"sin", "reduce_sum"},
    ]


def test_the_next_state_stays_alive_to_the_end():
    last = ow.graph.liveness(TRAINED)[-1]
    assert set(TRAINED.next_state.values()) <= last
    assert TRAINED.loss in last
    assert not any(v.name.startswith("grad(w)") for v in last)


PRUNED = {
    "mul": (["mul"], {"w"}, {"x"}),
    "sin": (["mul", "sin"], {"w"}, {"x"}),
    "add": (["mul", "sin", "cos", "add"], {"w"}, {"x"}),
    "b": ([], {"b"}, set()),
    "x": ([], set(), {"x"}),
}


@pytest.mark.parametrize("program", [PROGRAM, TRAINED], ids=["forward", "trained"])
@pytest.mark.parametrize("target", PRUNED)
def test_prune_keeps_what_the_target_needs(program, target):
    part = ow.prune(program, [target])
    ops, state, inputs = PRUNED[target]
    assert types(part) == ops
    assert (names(part.state), names(part.inputs)) == (state, inputs)
    assert names(part.outputs) == {target}
    assert (part.next_state, part.gradients, part.initializers, part.hyperparameters) == ({}, (), (), ())
    assert part.loss is None


def test_prune_to_the_loss_keeps_the_loss():
    part = ow.prune(TRAINED, [TRAINED.loss])
    assert part.loss is TRAINED.loss
    assert types(part) == types(PROGRAM)
    assert names(part.state) == {"w", "b"}


def test_prune_to_a_gradient_keeps_its_pair():
    part = ow.prune(TRAINED, ["grad(w)"])
    assert [p.name for p, _ in part.gradients] == ["w"]
    assert types(part)[:4] == ["mul", "sin", "cos", "ones"]
    assert all(op.made_by is not ow.Pass.UPDATE for op in part.ops)
    assert not part.next_state


def test_prune_to_an_update_keeps_that_update_alone():
    target = next(t for t in TRAINED.updates if t.op.inputs[0].name == "w")
    part = ow.prune(TRAINED, [target])
    assert {old.name: new.name for old, new in part.next_state.items()} == {
        "w": "next(w)",
        "w/velocity": "next(w/velocity)",
    }
    assert names(part.hyperparameters) == {"learning_rate", "momentum"}
    assert [op.type for op in part.ops if op.made_by is ow.Pass.UPDATE] == ["momentum"]
    made = {v.name for op in part.initializers for v in op.outputs}
    assert made == {"w/velocity", "learning_rate", "momentum"}


def test_several_targets_become_the_outputs_in_their_order():
    part = ow.prune(PROGRAM, ["cos", PROGRAM["sin"]])
    assert [v.name for v in part.outputs] == ["cos", "sin"]


def test_a_constant_is_dropped_with_its_reader():
    table = jnp.arange(3.0)
    program = ow.trace(lambda w: (jnp.sin(w), w * table), V)
    assert len(program.constants) == 1
    assert len(ow.prune(program, ["mul"]).constants) == 1
    assert not ow.prune(program, ["sin"]).constants


def printing(params, x):
    jax.debug.print("{x}", x=x)
    hidden = jnp.sin(params["w"] * x)
    jax.debug.print("{h}", h=hidden)
    total = jnp.sum(jnp.cos(hidden))
    jax.debug.print("{t}", t=total)
    return total


EFFECTS = {"mul": 1, "sin": 2, "cos": 2, "reduce_sum": 3}


@pytest.mark.parametrize("target", EFFECTS)
def test_an_effect_stays_when_everything_it_reads_stays(target):
    part = ow.prune(ow.trace(printing, {"w": V}, V), [target])
    assert sum(op.body.has_effects for op in part.ops) == EFFECTS[target]


def test_the_effects_that_stay_are_run(capfd):
    part = ow.prune(ow.trace(printing, {"w": V}, V), ["sin"])
    step = ow.compile(part)
    step(step.init({"w": V}), V)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("\n") == 2


def test_prune_leaves_the_program_alone():
    before = (TRAINED.ops, TRAINED.state, TRAINED.outputs)
    ow.prune(TRAINED, ["mul"])
    assert (TRAINED.ops, TRAINED.state, TRAINED.outputs) == before


def test_an_unknown_target_offers_the_nearest_name():
    with pytest.raises(LookupError, match=r"no Variable named 'sine'.*'sin'.*lists them all\.$"):
        ow.prune(PROGRAM, ["sine"])


@pytest.mark.parametrize("targets", [None, 3], ids=repr)
def test_targets_that_are_none_are_refused_in_the_words_of_prune(targets):
    with pytest.raises(ow.ArgumentError, match=f"prune was given {targets}; expected what is to be"):
        ow.prune(PROGRAM, targets)
