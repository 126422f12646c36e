"""Ctrl-C with real signals: what is marked is finished first, whatever else happens meanwhile."""

import asyncio
import signal
import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from tests.torture.interrupts import torture

from onward.execute.loop.interrupt import Interruptible, Uninterrupted


def interrupt():
    signal.raise_signal(signal.SIGINT)  # in this thread, and handled before the next line


@contextmanager
def caught():
    """Catch the KeyboardInterrupt that must come."""
    errors = []
    try:
        yield errors
    except KeyboardInterrupt as error:
        errors.append(error)
    assert len(errors) == 1


@pytest.fixture(autouse=True)
def handler_is_restored(signals_of_a_new_process):
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.fixture
def handle(handler_is_restored):
    """Install a handler of the user's own for one test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_outside_raises_at_once():
    done = []
    with caught(), Interruptible():
        interrupt()
        done.append("after")
    assert done == []


def test_an_interrupt_inside_waits_for_the_end():
    done = []
    with caught(), Interruptible() as interrupts:
        with interrupts.uninterrupted:
            interrupt()
            interrupt()
            done.append("inside")
        done.append("after")
    assert done == ["inside"]


def test_one_interrupt_raises_once():
    done = []
    with Interruptible() as interrupts:
        with caught(), interrupts.uninterrupted:
            interrupt()
        with interrupts.uninterrupted:
            done.append("next")
    assert done == ["next"]


def test_parts_may_be_nested():
    done = []
    with caught(), Interruptible() as interrupts, interrupts.uninterrupted:
        with interrupts.uninterrupted:
            interrupt()
        done.append("outer")
    assert done == ["outer"]


def test_an_inner_interruptible_waits_for_the_outer_part():
    done = []

    def session():
        with Interruptible() as inner:
            with inner.uninterrupted:
                interrupt()
            done.append("inner")
            interrupt()
        done.append("session")

    with caught(), Interruptible() as outer, outer.uninterrupted:
        session()
        done.append("outer")
    assert done == ["inner", "session", "outer"]


def test_an_inner_interruptible_outside_the_outer_part_raises_at_its_own_end():
    done = []
    with Interruptible() as outer:
        with caught(), Interruptible() as inner:
            with inner.uninterrupted:
                interrupt()
                done.append("inner")
            done.append("after")
        with caught(), outer.uninterrupted:
            interrupt()
            done.append("outer")
    assert done == ["inner", "outer"]


def test_the_same_object_twice():
    interrupts = Interruptible()
    with interrupts:
        with interrupts:
            pass
        assert isinstance(signal.getsignal(signal.SIGINT), Uninterrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with caught(), interrupts, interrupts.uninterrupted:
        interrupt()


def test_an_error_in_the_part_becomes_the_context():
    with caught() as raised, Interruptible() as interrupts, interrupts.uninterrupted:
        interrupt()
        raise ValueError("broken")
    assert isinstance(raised[0].__context__, ValueError)


def test_an_error_alone_passes_unchanged():
    with pytest.raises(ValueError, match="broken"), Interruptible() as interrupts, interrupts.uninterrupted:
        raise ValueError("broken")


def test_a_keyboard_interrupt_in_the_part_is_not_raised_twice():
    with Interruptible() as interrupts:
        with caught() as raised, interrupts.uninterrupted:
            interrupt()
            raise KeyboardInterrupt("by hand")
        with interrupts.uninterrupted:
            pass
    assert raised[0].args == ("by hand",)


def test_an_interrupt_on_the_way_out_is_raised_after_the_handler_is_restored():
    seen = []

    class Watched(Uninterrupted):  # what is pending when the last line of __exit__ is reached
        def __exit__(self, *error):
            seen.append(signal.getsignal(signal.SIGINT))
            super().__exit__(*error)

    interrupts = Interruptible()
    interrupts.__enter__()
    part = interrupts.uninterrupted = Watched(signal.default_int_handler)
    part.users = 1
    signal.signal(signal.SIGINT, part)
    part.pending = True
    with caught():
        interrupts.__exit__(None, None, None)
    assert seen == [signal.default_int_handler]


def test_the_first_moment_of_the_way_out_is_covered():
    class Frame:
        f_code = Interruptible.__exit__.__code__

    part = Uninterrupted(signal.default_int_handler)
    part(signal.SIGINT, Frame())
    assert part.pending


@pytest.mark.parametrize("inside", [True, False])
def test_a_handler_of_the_users_own_is_called_instead(handle, inside):
    calls, seen = [], []
    own = lambda number, frame: calls.append(number)  # noqa: E731
    handle(own)
    with Interruptible() as interrupts:
        if inside:
            with interrupts.uninterrupted:
                interrupt()
                seen.append(len(calls))
        else:
            interrupt()
            seen.append(len(calls))
    assert seen == [0 if inside else 1]
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("former", [signal.SIG_IGN, signal.SIG_DFL])
def test_no_handler_where_python_has_none(handle, former):
    handle(former)
    with Interruptible() as interrupts, interrupts.uninterrupted:
        assert signal.getsignal(signal.SIGINT) is former
        if former is signal.SIG_IGN:
            interrupt()


def test_a_handler_installed_meanwhile_stays(handle):
    own = lambda number, frame: None  # noqa: E731
    with Interruptible():
        handle(own)
    assert signal.getsignal(signal.SIGINT) is own


def test_in_another_thread_nothing_is_done():
    seen = []

    def work():
        with Interruptible() as interrupts, interrupts.uninterrupted:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_under_asyncio_the_task_is_cancelled_after_the_part():
    done = []

    async def train():
        with Interruptible() as interrupts:
            with interrupts.uninterrupted:
                interrupt()
                done.append("inside")
            done.append("before the next await")
            await asyncio.sleep(60)

    with caught():
        asyncio.run(train())
    assert done == ["inside", "before the next await"]


@pytest.mark.parametrize("protected", [True, False])
def test_a_donated_state(protected):
    jitted = jax.jit(lambda state: state + 1, donate_argnums=0)

    def step(state):
        state = jitted(state)
        interrupt()  # after the call, before the assignment
        return state

    state = jitted(jnp.zeros(8))
    with caught(), Interruptible() as interrupts:
        if protected:
            with interrupts.uninterrupted:
                state = step(state)
        else:
            state = step(state)
    assert state.is_deleted() is not protected
    assert not protected or state.tolist() == [2.0] * 8


def test_random_interrupts_of_a_training_process():
    assert torture(10) == ["kept"] * 10
