"""Planted faults: the op, its pass and the line are found; what is harmless is not reported."""

import inspect
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import counted

import onward as ow
from onward.core.words import Pass
from onward.develop.watch.watch import watch
from onward.execute.nonfinite.flags import code_of, flags_of, unpacked
from onward.execute.step import Step
from onward.explain.find_nonfinite import find_nonfinite

ONE = np.ones(3, "float32")
HOLE = np.array([1, 0, 2], "float32")
ROWS = np.ones((5, 3), "float32")
GAP = ROWS.copy()
GAP[3, 1] = 0
FORWARD, BACKWARD, UPDATE = Pass.FORWARD, Pass.BACKWARD, Pass.UPDATE


class Case(NamedTuple):
    """A loss of (w, x) or (x), with ``# here`` at the line of the fault, and what is to be found."""

    loss: object
    x: np.ndarray
    type: str
    made_by: Pass
    where: str = ""
    optimizer: ow.Optimizer = ow.SGD(0.1)
    w: np.ndarray = ONE


def line_of(function):
    """The file and the line that has the mark."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, line in enumerate(lines) if "# here" in line)
    return inspect.getsourcefile(function), number


def found_in(program, params, x, at=0, **options):
    """What is found in this step, by the initial values, which nothing compiles for that."""
    step = Step(program, (), True, ahead=False)
    state = step.init(params, **options)
    return find_nonfinite(step, state.replace({"step": jnp.int32(at)}) if at else state, x)


def log_of_zero(w, x):
    with jax.named_scope("layer"):
        h = w * x
        return jnp.sum(
            jnp.log(h)  # here
        )


def division(w, x):
    return jnp.sum(w / x)  # here


def root_of_negative(w, x):
    h = x - 1.5 * w
    return jnp.sum(jnp.sqrt(h))  # here


def exp_overflow(w, x):
    return jnp.sum(jnp.exp(w * x * 100))  # here


def power(w, x):
    h = jnp.cos(w) - 2
    return jnp.sum(h**x)  # here


def rsqrt(w, x):
    return jnp.sum(jax.lax.rsqrt(w * x))  # here


def arccos(w, x):
    return jnp.sum(jnp.arccos(w * x))  # here


def negative_power(w, x):
    return jnp.sum((w * x) ** -2)  # here


def masked_everywhere(w, x):
    scores = jnp.where(x[:, None] > 0, w * x, -jnp.inf)
    weights = jax.nn.softmax(scores)  # here
    return jnp.sum(weights * w)


def outside_of_the_table(w, x):
    rows = w.at[jnp.int32(x)].get(mode="fill")  # here
    return jnp.sum(rows)


@jax.jit
def inner(x):
    return jnp.log(x)  # here


@jax.jit
def outer(x):
    return inner(x) * 2


def nested_jit(w, x):
    return jnp.sum(outer(w * x))


def library(w, x):
    h = jax.nn.relu(w * x)
    return jnp.sum(jax.scipy.special.logit(h))  # here


def deviation(w, x):
    return jnp.sum(jnp.std(w) * x)  # here


@jax.custom_jvp
def safe_log(x):
    y = x + 0
    return jnp.log(y)  # here


safe_log.defjvps(lambda t, out, x: t)


def custom_jvp_forward(w, x):
    return jnp.sum(safe_log(w * x))


def in_a_branch(w, x):
    def divided(h):
        return w / h  # here

    return jnp.sum(jax.lax.cond(x[0] > 0, divided, lambda h: h, x))


def in_a_while(w, x):
    def body(carry):
        i, y = carry
        return i + 1, y / (2 - i)  # here

    _, y = jax.lax.while_loop(lambda c: c[0] < 4, body, (0, jax.lax.stop_gradient(w) * x))
    return jnp.sum(w * x) + jnp.sum(y)


def in_a_scan(w, x):
    def body(h, row):
        h = h * row
        return h, jnp.log(h)  # here

    return jnp.sum(jax.lax.scan(body, w, x)[1])


def in_nested_scans(w, x):
    def within(h, row):
        return jnp.sqrt(h / row), None  # here

    def body(h, _):
        return jax.lax.scan(within, h, x)[0], None

    return jnp.sum(jax.lax.scan(body, w, None, length=2)[0])


def carried_in_a_scan(w, x):
    def body(h, row):
        h = h * 1e15  # here
        return h, row

    return jnp.sum(jax.lax.scan(body, w, x)[0])


def half_overflow(w, x):
    h = (w * 300).astype(jnp.float16)
    return jnp.sum((h * h).astype(jnp.float32) * x)  # here


def narrowed(w, x):
    h = (w * 1e6).astype(jnp.float16)  # here
    return jnp.sum(h.astype(jnp.float32) * x)


def brain_float(w, x):
    h = (w * x).astype(jnp.bfloat16)
    return jnp.sum(jnp.log(h)).astype(jnp.float32)  # here


@jax.checkpoint
def again(x):
    return jnp.log(x)  # here


def recomputed(w, x):
    return jnp.sum(again(w * x))


def root_at_zero(w, x):
    return jnp.sum(jnp.sqrt(w * x))  # here


def norm_at_zero(w, x):
    h = w * x
    return jnp.linalg.norm(h)  # here


def power_at_zero(w, x):
    return jnp.sum((w * x) ** 0.5)  # here


def arctan2_at_zero(w, x):
    h = w * x
    return jnp.sum(jnp.arctan2(h, h))  # here


def hidden_by_where(w, x):
    h = w * x
    logs = jnp.log(h)  # here
    return jnp.sum(jnp.where(h > 0, logs, 0.0))


@jax.custom_vjp
def bad_rule(x):
    return x * 2


def bad_backward(x, g):
    return (g / x,)  # here


bad_rule.defvjp(lambda x: (x * 2, x), bad_backward)


def custom_vjp_backward(w, x):
    return jnp.sum(bad_rule(w * x))  # here


def scan_backward(w, x):
    def body(h, row):
        h = jnp.sqrt(h * row)  # here
        return h, h

    return jnp.sum(jax.lax.scan(body, w, x)[1])


def arccos_at_one(w, x):
    return jnp.sum(jnp.arccos(w * x / 2))  # here


def gradient_overflow(w, x):
    h = w * x  # here
    return jnp.sum(h * 1e20)


def plain(w, x):
    return jnp.sum(w * x)


def written(w, x):
    return plain(w, x) * jnp.where(x[0] > 0.5, jnp.inf, 1.0)  # here


def written_in_scans(w, x):
    def within(h, i):
        return h * jnp.where(i == 2, jnp.inf, 1.0), None  # here

    def body(h, _):
        return jax.lax.scan(within, h, jnp.arange(4))[0], None

    return jax.lax.scan(body, plain(w, x), None, length=3)[0]


class Divided(ow.GradientRule):
    def update(self, parameter, gradient, slots):
        return gradient / (gradient - gradient), slots  # here


class Logged(ow.Optimizer):
    def update(self, parameter, gradient, slots):
        return parameter - jnp.log(gradient), slots  # here


def late(step):
    return 0.1 / jnp.float32(abs(step - 1))  # here


CASES = {
    "log": Case(log_of_zero, HOLE, "log", FORWARD),
    "div": Case(division, HOLE, "div", FORWARD),
    "sqrt of negative": Case(root_of_negative, HOLE, "sqrt", FORWARD),
    "exp": Case(exp_overflow, HOLE, "exp", FORWARD),
    "pow": Case(power, HOLE + 0.5, "pow", FORWARD),
    "rsqrt": Case(rsqrt, HOLE, "rsqrt", FORWARD),
    "arccos": Case(arccos, HOLE, "acos", FORWARD),
    "negative power": Case(negative_power, HOLE, "integer_pow", FORWARD),
    "masked row": Case(masked_everywhere, HOLE, "sub", FORWARD),
    "gather": Case(outside_of_the_table, 4 * HOLE, "gather", FORWARD),
    "nested jit": Case(nested_jit, HOLE, "log", FORWARD),
    "jax.scipy": Case(library, HOLE / 2, "log", FORWARD),
    "jnp.std": Case(deviation, HOLE, "sqrt", BACKWARD),
    "custom_jvp": Case(custom_jvp_forward, HOLE, "log", FORWARD),
    "cond": Case(in_a_branch, HOLE, "div", FORWARD, "branch 1"),
    "while": Case(in_a_while, HOLE, "div", FORWARD, "turn 2 "),
    "scan": Case(in_a_scan, GAP, "log", FORWARD, "turn 3 of 5"),
    "nested scan": Case(in_nested_scans, GAP, "div", FORWARD, "turn 0 of 2|turn 3 of 5"),
    "carried": Case(carried_in_a_scan, ROWS, "mul", FORWARD, "turn 2 of 5"),
    "float16": Case(half_overflow, HOLE, "mul", FORWARD),
    "narrowed": Case(narrowed, HOLE, "convert_element_type", FORWARD),
    "bfloat16": Case(brain_float, HOLE, "log", FORWARD),
    "checkpoint": Case(recomputed, HOLE, "log", FORWARD),
    "sqrt": Case(root_at_zero, HOLE, "sqrt", BACKWARD),
    "norm": Case(norm_at_zero, 0 * ONE, "sqrt", BACKWARD),
    "power": Case(power_at_zero, HOLE, "pow", BACKWARD),
    "arctan2": Case(arctan2_at_zero, HOLE, "atan2", BACKWARD),
    "where": Case(hidden_by_where, HOLE, "log", BACKWARD),
    "custom_vjp": Case(custom_vjp_backward, HOLE, "bad_rule", BACKWARD),
    "scan, backward": Case(scan_backward, GAP, "scan", BACKWARD, "turn 3 of 5"),
    "arccos, backward": Case(arccos_at_one, HOLE, "acos", BACKWARD),
    "overflow, backward": Case(gradient_overflow, 1e30 * ONE, "mul", BACKWARD, w=1e-30 * ONE),
    "written": Case(written, HOLE, "select_n", FORWARD),
    "written in scans": Case(written_in_scans, HOLE, "select_n", FORWARD, "turn 0 of 3|turn 2 of 4"),
    "epsilon": Case(plain, HOLE, "adam", UPDATE, optimizer=ow.Adam(0.1, epsilon=0.0)),
    "adagrad": Case(plain, HOLE, "adagrad", UPDATE, optimizer=ow.Adagrad(0.1, epsilon=0.0)),
    "large rate": Case(plain, 1e10 * ONE, "sgd", UPDATE, optimizer=ow.SGD(1e30)),
}


MARKED = {
    "nested jit": inner.__wrapped__,
    "custom_jvp": safe_log.fun,
    "checkpoint": again.__wrapped__,
}


def placed(finding):
    """Where within loops and branches it is."""
    return [part.where for part in finding.inside if part.where]


@pytest.mark.parametrize("name", CASES)
def test_the_op_the_pass_and_the_line_of_a_fault(name):
    case = CASES[name]
    finding = found_in(case.optimizer.minimize(case.loss, case.w, case.x), case.w, case.x)
    op = finding.forward or finding.op
    types = {op.type, *(part.op.type for part in finding.inside)}
    assert (case.type in types, finding.made_by) == (True, case.made_by), str(finding)
    where = [w for w in case.where.split("|") if w]
    assert len(placed(finding)) == len(where), str(finding)
    assert all(text.startswith(w) for text, w in zip(placed(finding), where, strict=True)), str(finding)
    if case.made_by is not UPDATE:
        # JAX tells the line of a custom_vjp rule, or only that of the call
        rule = [line_of(bad_backward)] if name == "custom_vjp" else []
        lines = [line_of(MARKED.get(name, case.loss)), *rule]
        assert (finding.file, finding.line) in lines, str(finding)


@pytest.mark.parametrize(
    ("optimizer", "marked", "type_", "x"),
    [
        (ow.SGD(late), late, "div", ONE),
        (ow.SGD(0.1, rules=[Divided()]), Divided.update, "div", ONE),
        (Logged(), Logged.update, "log", HOLE),
    ],
    ids=["schedule", "gradient rule", "optimizer"],
)
def test_the_users_line_in_an_update(optimizer, marked, type_, x):
    finding = found_in(optimizer.minimize(plain, ONE, x), ONE, x, at=1)
    assert (finding.type, finding.made_by) == (type_, UPDATE), str(finding)
    assert (finding.file, finding.line) == line_of(marked), str(finding)


@cache
def minimized():
    """A Program, and values of its state and data in which nothing is found."""
    program = ow.Adam(0.1).minimize(plain, ONE, ONE)
    values = {"w": ONE, "x": ONE, "step": np.int32(0), "w/mean": 0 * ONE, "w/variance": ONE}
    values |= {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
    assert find_nonfinite(program, [jnp.asarray(values[v.name], v.dtype) for v in program.state], ONE) is None
    return program, values


@pytest.mark.parametrize(
    ("name", "kind"),
    [("w", "parameter"), ("learning_rate", "state"), ("w/mean", "state"), ("x", "data")],
)
def test_what_was_not_finite_before_is_named_as_such(name, kind):
    program, values = minimized()
    values = values | {
        name: np.float32(np.inf) if name == "learning_rate" else np.array([1, np.nan, 2], "float32")
    }
    state = [jnp.asarray(values[v.name], v.dtype) for v in program.state]
    finding = find_nonfinite(program, state, values["x"])
    assert (finding.op, finding.made_by, finding.variable.name, finding.type) == (None, None, name, "")
    assert str(finding).startswith(f"The {kind} {name!r} is not finite")


def attention(w, x):
    mask = jnp.tril(jnp.ones((3, 3), bool))
    scores = jnp.where(mask, w[:, None] * x, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores) * x)


def attention_by_addition(w, x):
    mask = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), 0.0, -jnp.inf)
    return jnp.sum(jax.nn.softmax(w[:, None] * x + mask) * x)


def guarded_log(w, x):
    h = w * x
    return jnp.sum(jnp.where(h > 0, jnp.log(jnp.where(h > 0, h, 1.0)), 0.0))


def largest_so_far(w, x):
    def body(most, row):
        most = jnp.maximum(most, row)
        return most, most

    return jnp.sum(w * jax.lax.scan(body, jnp.full(3, -jnp.inf), x[None])[1])


def log_sum_exp(w, x):
    return jax.nn.logsumexp(jnp.where(x > 0, w * x, -jnp.inf))


def unused_nan(w, x):
    return jnp.sum(w * x), jnp.log(-x)


def largest(w, x):
    return jnp.max(w * x, initial=-jnp.inf)


def ends_of_range(w, x):
    return jnp.sum(jnp.clip(w * x, -jnp.inf, jnp.inf))


HARMLESS = [attention, attention_by_addition, guarded_log, largest_so_far, log_sum_exp, largest]


@pytest.mark.parametrize("loss", [*HARMLESS, ends_of_range])
def test_infinities_that_are_meant_are_no_fault(loss):
    assert found_in(ow.SGD(0.1).minimize(loss, ONE, HOLE), ONE, HOLE) is None


def test_a_nan_that_nothing_reads_is_no_fault():
    program = ow.SGD(0.1).minimize(unused_nan, ONE, HOLE, has_aux=True)
    assert found_in(program, ONE, HOLE) is None


def masked_then_divided(w, x):
    h = attention(w, x)
    return h + jnp.sum(jnp.max(jnp.where(x > 0, w, -jnp.inf))) + jnp.sum(w / x)  # here


def test_the_fault_is_found_beside_infinities_that_are_meant():
    finding = found_in(ow.SGD(0.1).minimize(masked_then_divided, ONE, HOLE), ONE, HOLE)
    assert (finding.type, finding.line) == ("div", line_of(masked_then_divided)[1]), str(finding)


def exp_of_masked(w, x):
    scores = jnp.where(x > 0, 100 * w * x, -jnp.inf)
    return jnp.sum(jnp.exp(scores))  # here


def test_what_overflows_beside_a_mask_is_named_not_the_mask():
    finding = found_in(ow.SGD(0.1).minimize(exp_of_masked, ONE, HOLE), ONE, HOLE)
    assert (finding.type, finding.line) == ("exp", line_of(exp_of_masked)[1]), str(finding)


def layers(params, x):
    for w in params:
        h = x * w
        x = x + jnp.log(h)  # here
    return jnp.sum(x)


def test_the_layer_of_a_rolled_program():
    params = [np.ones((2, 2), "float32") for _ in range(4)]
    params[2] = params[2] * 0
    program = ow.roll(ow.SGD(0.1).minimize(layers, params, np.ones((2, 2), "float32")))
    finding = found_in(program, params, np.ones((2, 2), "float32"))
    assert (finding.op.type, finding.type) == ("scan", "log")
    assert placed(finding) == ["turn 2 of 4 (counted from 0)"]
    assert (finding.file, finding.line) == line_of(layers)


def test_what_repeats_is_compiled_once():
    """Three times as many layers take no more compilations."""
    x, found, counts = np.ones((2, 2), "float32"), [], []
    for count in (16, 48):
        params = [np.ones((2, 2), "float32") for _ in range(count)]
        params[5] = params[5] * 0
        program = ow.Momentum(0.1).minimize(layers, params, x)
        with counted() as compiled:
            found.append(str(found_in(program, params, x)).splitlines()[0])
        counts.append(len(compiled))
    assert counts[1] <= counts[0]
    assert (
        found[0]
        == found[1]
        == "'log_5' is the first value that is not finite: 4 of 4 are infinite, the first at [0, 0]."
    )


NUMBERS = [0.0, -1.0, np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_flags_are_the_same_on_the_host_and_on_a_device(dtype):
    arrays = [jnp.asarray(NUMBERS[i:j], dtype) for i in range(5) for j in range(i, 6)]
    arrays = [*arrays, *(1j * x for x in arrays if dtype == "complex64")]
    found = [flags_of(x).tolist() for x in arrays]
    assert found == unpacked(jax.jit(lambda xs: [code_of(x) for x in xs])(arrays)).tolist()
    assert flags_of(jnp.asarray(NUMBERS)).tolist() == [True] * 3


def per_example(w, x):
    return jnp.mean(jnp.log(w * x))  # here


def test_the_micro_batch_of_an_accumulated_program():
    x = np.ones((8, 3), "float32")
    program = ow.accumulate(ow.SGD(0.1).minimize(per_example, ONE, x), 4)
    x[5, 1] = 0
    finding = found_in(program, ONE, x)
    assert (finding.type, placed(finding)[0]) == ("log", "turn 2 of 4 (counted from 0)"), str(finding)
    assert (finding.line, finding.made_by) == (line_of(per_example)[1], FORWARD)


def test_the_pass_within_an_accumulated_program():
    x = np.array([[1, 1, 1], [1, 0, 1]], "float32")
    program = ow.accumulate(ow.SGD(0.1).minimize(root_at_zero, ONE, x), 2, is_sum=True)
    finding = found_in(program, ONE, x)
    assert (finding.made_by, placed(finding)) == (BACKWARD, ["turn 1 of 2 (counted from 0)"]), str(finding)
    assert finding.line == line_of(root_at_zero)[1]


WRITTEN, LARGE, ZERO = "It stands in the function itself", "Numbers became too large", "A division by zero"
ADVICE = {
    "written": (written, ONE, WRITTEN),
    "in a scan": (written_in_scans, ONE, WRITTEN),
    "nan": (lambda w, x: jnp.sum(w * jnp.where(x > 0, x, jnp.nan)), HOLE, WRITTEN),
    "array": (lambda w, x: jnp.sum(w * x * np.array([1, np.inf, 2], "float32")), ONE, WRITTEN),
    "zero": (division, HOLE, ZERO),
    "divided by a written zero": (lambda w, x: jnp.sum(w * x / 0.0), ONE, ZERO),
    "negative over small": (lambda w, x: jnp.sum(w * x / 1e-30 / 1e-30), -ONE, LARGE),
    "negative over small data": (lambda w, x: jnp.sum(-1e30 * w / x), 1e-20 * ONE, LARGE),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice(name):
    loss, x, advice = ADVICE[name]
    finding = found_in(ow.trace(loss, ONE, x), ONE, x)
    assert finding.advice.startswith(advice), str(finding)


def test_the_scaled_gradient_that_overflows_in_mixed_precision():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2) * 1e4

    x = np.ones((4, 3), "float32")
    w = np.ones((3, 2), "float32")
    program = ow.mixed_precision(ow.SGD(0.1).minimize(loss, w, x), "float16")
    finding = found_in(program, w, x)
    assert finding.made_by is BACKWARD
    assert finding.variable.dtype == np.float16


@pytest.mark.parametrize("device", [0, 2])
def test_the_device_of_a_replicated_program(device):
    x = np.ones((8, 3), "float32")
    program = ow.replicate(ow.SGD(0.1).minimize(per_example, ONE, x), 4)
    x[2 * device + 1, 0] = 0
    finding = found_in(program, ONE, x)
    assert (finding.type, finding.device, finding.numbers.infinite) == ("log", device, 1), str(finding)
    assert finding.line == line_of(per_example)[1]
    assert found_in(program, ONE, np.ones((8, 3), "float32")) is None


def test_data_of_another_shape_and_a_packed_state_that_stays_usable():
    params = {f"w{i}": ONE for i in range(3)}

    def loss(params, x):
        return sum(jnp.sum(jnp.log(w * x)) for w in params.values())

    program = ow.Momentum(0.1).minimize(loss, params, ROWS)
    step = ow.compile(program)
    state = step.init(params)
    assert find_nonfinite(step, state, ROWS) is None
    assert find_nonfinite(step, state, (GAP[:4],)).numbers.first == (3, 1)
    assert find_nonfinite(step, state, {"x": GAP}).numbers.infinite == 1
    state, out = step(state, ROWS)
    assert float(out.loss) == 0


def test_random_keys_and_a_program_without_update():
    def loss(w, key):
        return jnp.sum(jnp.log(jax.random.uniform(key, (3,)) - 2 * w))

    key = jax.random.key(0)
    finding = found_in(ow.trace(loss, ONE, key), ONE, key)
    assert (finding.type, finding.made_by, finding.numbers.nan) == ("log", FORWARD, 3)


REPORT = """\
'layer/log' is the first value that is not finite: 1 of 3 is infinite, the first at [1].
  op      log, forward, scope layer
  line    test_find_nonfinite.py:{line} in log_of_zero
  reads   layer/mul  float32[3]  from 0 to 2, mean 1
  reaches layer/reduce_sum, grad(w), next(w)
  advice  The logarithm of 0 is minus infinity, that of a negative number NaN: add a small number before."""


def test_what_is_printed():
    finding = found_in(ow.SGD(0.1).minimize(log_of_zero, ONE, HOLE), ONE, HOLE)
    assert str(finding) == REPORT.format(line=line_of(log_of_zero)[1])


def test_bad_input():
    step = ow.compile(ow.SGD(0.1).minimize(plain, ONE, ONE))
    state = step.init(ONE)
    with pytest.raises(ow.ArgumentError, match=r"the function 'plain'|expected a Step or a Program"):
        find_nonfinite(plain, state, ONE)
    with pytest.raises(ow.ArgumentError, match="takes 1 data arguments"):
        find_nonfinite(step, state)
    with pytest.raises(ow.ArgumentError, match="expected the State before the step"):
        find_nonfinite(step, ONE, ONE)
    with pytest.raises(ow.ArgumentError, match="is 1 values; expected the State"):
        find_nonfinite(step, (ONE,), ONE)
    other = ow.compile(ow.SGD(0.1).minimize(lambda v, x: jnp.sum(v * x), ONE, ONE)).init(ONE)
    with pytest.raises(ow.StateError, match="has no 'w'"):
        find_nonfinite(step, other, ONE)
    step(state, ONE)
    with pytest.raises(ow.StateError, match="took its buffers over"):
        find_nonfinite(step, state, ONE)


def test_a_watched_program():
    program = ow.SGD(0.1).minimize(log_of_zero, ONE, HOLE)
    step = ow.compile(watch(program, "grad(w)"), check_finite=True)
    before = step.init(ONE)
    assert find_nonfinite(step, before, HOLE).type == "log"
    state, _ = step(before, HOLE)
    with pytest.raises(ow.NonFiniteError, match="'layer/log' is the first value"):
        step.expect_going(state)


def test_what_is_not_defined_is_not_called_too_large():
    program = ow.SGD(0.1).minimize(lambda w: jnp.sum(jnp.arctanh(w)), jnp.zeros(2))
    found = ow.find_nonfinite(program, [jnp.array([0.5, 2.0]), jnp.float32(0.1), jnp.int32(0)])
    assert found.numbers.nan == 1
    assert found.advice.startswith("It is not defined for what this op reads")
