"""A progress bar that never makes the device wait."""

import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from onward.fit import progress as module
from onward.fit.progress import Progress


class Scalar:
    """A device scalar whose computation we decide about."""

    def __init__(self, value, ready=False):
        self.value, self.ready = value, ready

    def is_ready(self):
        return self.ready

    def __float__(self):
        assert self.ready, "the bar waited for the device"
        return self.value


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until told."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(module, "monotonic", lambda: now.time)
    return now


@pytest.fixture
def bar(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(total=10, enabled=True, description="train")
    yield SimpleNamespace(
        progress=progress, shown=lambda: stream.getvalue().split("\r")[-1], all=stream.getvalue
    )
    progress.close()


def test_it_shows_epoch_counts_speed_and_metrics(bar):
    bar.progress.epoch(1, of=3)
    bar.progress.advance(32, loss=0.123456, accuracy=np.float32(0.5))
    shown = bar.shown()
    for words in ("train epoch 2/3", "1/10", "step", "examples/s", "loss 0.1235, accuracy 0.5"):
        assert words in shown


def test_an_epoch_of_unknown_number(bar):
    bar.progress.epoch(0)
    bar.progress.advance(1)
    assert "train epoch 1:" in bar.shown()


def test_it_is_drawn_ten_times_a_second(bar, clock):
    bar.progress.advance(1, loss=1.0)
    drawn = bar.all()
    for _ in range(3):
        bar.progress.advance(1, loss=2.0)
    assert bar.all() == drawn
    clock.time += module.INTERVAL
    bar.progress.advance(1, loss=3.0)
    assert "5/10" in bar.shown()
    assert "loss 3" in bar.shown()


def test_a_scalar_that_is_computing_is_shown_later(bar, clock):
    early, late = Scalar(1.5), Scalar(2.5)
    bar.progress.advance(1, loss=early)
    assert "loss" not in bar.shown()
    clock.time += 1
    bar.progress.advance(1, loss=late)
    assert "loss" not in bar.shown()
    early.ready = True
    clock.time += 1
    bar.progress.advance(1, loss=late)
    assert "loss 1.5" in bar.shown()
    late.ready = True
    bar.progress.close()
    assert "loss 2.5" in bar.shown()


def test_steps_without_metrics_in_between(bar, clock):
    scalar = Scalar(0.5)
    bar.progress.advance(1)
    clock.time += 1
    bar.progress.advance(1, loss=scalar)
    scalar.ready = True
    clock.time += 1
    bar.progress.advance(1)
    assert "loss 0.5" in bar.shown()


def test_close_shows_the_last_counts(bar):
    for _ in range(10):
        bar.progress.advance(1)
    bar.progress.close()
    bar.progress.close()
    assert "10/10" in bar.shown()


def test_a_message_stands_above_the_bar(bar):
    bar.progress.message("test_loss 0.31")
    assert "test_loss 0.31\n" in bar.all()


def test_a_resumed_training_counts_on(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(total=10, enabled=True, description="", start=4)
    progress.epoch(2)
    progress.advance(32)
    progress.close()
    assert "epoch 3:" in stream.getvalue()
    assert "5/10" in stream.getvalue()


def test_no_total(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(total=None, enabled=True, description="train")
    progress.advance(32)
    progress.close()
    assert "1step" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_by_default_it_is_on_in_a_terminal(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(total=1, enabled=None, description="train")
    progress.advance(1)
    progress.message("hello")
    progress.close()
    assert bool(stream.getvalue()) is terminal


def test_a_bar_left_open_at_exit():
    code = "from onward.fit.progress import Progress; bar = Progress(9, True, 'train'); bar.advance(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1/9" in done.stderr


def test_without_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    Progress(total=1, enabled=None, description="train").advance(1)


@pytest.mark.parametrize("widgets", [True, False])
def test_in_a_notebook_widgets_are_used_only_where_installed(monkeypatch, widgets):
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    made = []
    rich = SimpleNamespace(tqdm=lambda **options: made.append(options))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(module, "find_spec", lambda name: object() if widgets else None)
    monkeypatch.setattr(module, "import_module", lambda name: rich)
    monkeypatch.setattr(module, "finalize", lambda *args: None)
    monkeypatch.setattr(module, "_Bar", lambda **options: made.append("plain"))
    Progress(total=1, enabled=None, description="train")
    assert len(made) == 1
    assert (made == ["plain"]) is not widgets
