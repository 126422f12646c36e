"""A live view of a training: it shows what is known, waits for nothing, and outlives its terminal."""

import io
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.explain.watched.live import sparkline
from onward.explain.watched.live_chart import Curve, LiveChart

W = {"a": np.ones(2, "float32"), "b": np.ones(2, "float32")}


class Late:
    """A number that the device has not computed, until told."""

    shape = ()

    def __init__(self, value):
        self.value, self.ready = value, False

    def is_ready(self):
        return self.ready

    def __float__(self):
        assert self.ready, "the view waited for the device"
        return self.value


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(file):
    return [[part.strip() for part in line.split("  ") if part] for line in file.getvalue().splitlines()]


def test_a_log_has_a_line_for_each_look():
    file = io.StringIO()
    with ow.Loop([ow.Live(every=0, file=file)]) as loop:
        for n in range(3):
            loop.step(loss=4.0 / 2**n, accuracy=0.5)
    (first, *_, last) = lines(file)
    assert len(lines(file)) == 4
    assert first[:2] == ["step 1", "loss 4 ▁"]
    assert last[:2] == ["step 3", "loss 1 █▃▁"]
    assert last[2].endswith(" steps/s")
    assert last[3] == "accuracy 0.5"
    assert last[4].startswith("memory ")


def test_a_terminal_has_one_line_that_is_written_over():
    file = Terminal()
    with ow.Loop([ow.Live(every=0, file=file)]) as loop:
        for n in range(30):
            loop.step(loss=4.0 / 2**n)
    text = file.getvalue()
    assert text.count("\n") == 1
    assert text.count("\r") == 31
    assert max(map(len, text.split("\r"))) <= 80


def test_what_is_still_computing_is_shown_later():
    file, late = io.StringIO(), [Late(float(n)) for n in range(4)]
    live = ow.Live(every=0, file=file)
    with ow.Loop([live]) as loop:
        for number in late:
            late[0].ready = late[2].ready = loop.steps > 1  # the third is known before the second
            loop.step(loss=number)
        assert live.curves[0].values.tolist() == [0.0]
        for number in late:
            number.ready = True
    assert live.curves[0].values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [line[1][:6] for line in lines(file)[2:]] == ["loss 0", "loss 0", "loss 3"]


def test_a_loss_that_is_not_a_number_is_shown_and_what_is_measured_now_and_then_stays():
    file = io.StringIO()
    live = ow.Live(every=0, file=file)
    with ow.Loop([live]) as loop:
        for loss in (100.0, 1.0, float("nan"), float("-inf"), float("nan")):
            metrics = {"accuracy": 0.5} if loop.steps == 1 else {}
            loop.step(loss=loss, **metrics)
    (*_, last) = lines(file)
    assert (last[1], last[3]) == ("loss nan █▁", "accuracy 0.5")
    assert "nan" in LiveChart(live.curves, "").svg


def test_it_looks_at_the_clock_first():
    file = io.StringIO()
    with ow.Loop([ow.Live(every=3600, file=file)]) as loop:
        for _ in range(100):
            loop.step(loss=1.0)
    assert [line[0] for line in lines(file)] == ["step 1", "step 100"]


def test_a_closed_terminal_does_not_end_the_training(monkeypatch):
    file = io.StringIO()
    live = ow.Live(every=0, file=file)
    with ow.Loop([live]) as loop:
        loop.step(loss=1.0)
        file.close()
        loop.step(loss=2.0)
    assert live.curves[0].values.tolist() == [1.0, 2.0]
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with ow.Loop([ow.Live(every=0, file=plain)]) as loop:
        loop.step(loss=1.0)
    assert plain.buffer.getvalue().startswith(b"step 1  loss 1 ?")
    monkeypatch.setattr("sys.stdout", None)  # a process without a console
    with ow.Loop([ow.Live(every=0)]) as loop:
        loop.step(loss=1.0)


@pytest.fixture(scope="module")
def seen():
    """The curves of a watched step with a schedule."""
    program = ow.SGD(lambda t: 0.1 / (t + 1)).minimize(lambda w, x: jnp.sum(w["a"] * w["b"] * x), W, 1.0)
    watched = ow.watch(program, "learning_rate", gradients=True, statistics=("norm", "mean"), every=2)
    step = ow.compile(watched)
    state, live = step.init(W), ow.Live(every=0, file=io.StringIO())
    with ow.Loop([live]) as loop:
        for _ in range(4):
            state, out = step(state, 1.0)
            loop.step(out, state)
        loop.test(test_loss=0.5)
    return {curve.name: curve for curve in live.curves}, loop, live


def test_gradient_norms_and_a_scheduled_rate_are_those_that_watch_saw(seen):
    curves, loop, _ = seen
    assert set(curves) == {"loss", "test_loss", "gradient norm", "learning_rate"}
    norms = [loop.history.watched.of(name, "norm")[1] for name in ("grad(a)", "grad(b)")]
    np.testing.assert_allclose(curves["gradient norm"].values, np.hypot(*norms))
    steps, rates = curves["learning_rate"].steps, curves["learning_rate"].values
    np.testing.assert_allclose(rates, 0.1 / steps, rtol=1e-6)


def test_the_curves_are_files(seen, tmp_path):
    *_, live = seen
    texts = "".join(ET.parse(live.save(tmp_path / "a.svg")).getroot().itertext())
    assert "var(" not in texts
    assert "gradient norm" in texts
    assert "step 4  " in texts
    assert live.save(tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_a_chart_stands_what_no_axis_can_show():
    odd = [
        Curve("nan", [1, 2], [np.inf, -np.inf]),
        Curve("one", [3], [2.0]),
        Curve("far", [1, 2], [1e-9, 1.0]),
    ]
    chart = LiveChart([curve.measured() for curve in odd], "step 3")
    texts = [node.text for node in ET.fromstring(chart.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"nan -inf", "one 2", "far 1", "1e-09", "step 3"} <= set(texts)
    assert chart._repr_mimebundle_()["text/plain"] == "step 3"
    assert ET.fromstring(LiveChart([], "").svg) is not None


def test_bars_are_logarithmic_where_numbers_span_much():
    assert sparkline([1000.0, 1.0, 0.001]) == "█▅▁"
    assert sparkline([float("nan"), 1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
