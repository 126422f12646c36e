"""The process that hosts an object: it makes it, calls its methods, and ends with it."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import warnings
from concurrent.futures import Future
from threading import Thread
from time import sleep
from typing import Any, ClassVar

from onward.core.extras import require
from onward.execute.host_memory import keep_host_memory
from onward.fleet.link import HostAddress, Unreachable

LOOK = 0.5  # seconds between two looks at whether a hosted object has lost its place


def is_reborn() -> bool:
    """Whether this process hosts an object that was lost with the process before, and made again.

    >>> is_reborn()
    False
    """
    return Host.reborn


class Host:
    """The Ray actor that makes a hosted object in a process of its own and calls its methods.

    Methods that are ``async def`` run on one event loop, so between two ``await`` nothing else of the kind
    runs. Other methods run in a thread each. What memory the loop's thread has used is kept for its next
    call.
    """

    reborn: ClassVar[bool] = False
    _name = "a hosted object"  # until its factory has arrived

    def __init__(self, name: str, made: bytes) -> None:
        self._name = name
        self._made: Future[Any] = Future()
        Host.reborn = _was_restarted()
        keep_host_memory()
        self._loop = asyncio.new_event_loop()  # one thread, as each thread keeps memory of its own
        Thread(target=self._loop.run_forever, name="onward-methods", daemon=True).start()
        Thread(target=self._make, args=(made,), name="onward-object", daemon=True).start()

    def _make(self, made: bytes) -> None:
        """Make the object while calls wait for it; then look whether another process has its place."""
        try:
            ray = require("ray", "cluster")
            factory, arguments = ray.get(ray.cloudpickle.loads(made))
            self._made.set_result(factory(*arguments))
        except Unreachable as error:  # it lost its place before it had it; Ray makes the next one
            _leave(str(error))
        except Exception as error:  # Ray would tell it as a text
            self._made.set_exception(error)
            return
        ending = getattr(self._made.result(), "ending", lambda: None)
        while not (found := ending()):
            sleep(LOOK)
        _leave(found)

    def __repr__(self) -> str:
        return self._name

    def call(self, asked: tuple[str, tuple[Any, ...]]) -> Any:
        """The result of a method, which is named with its arguments."""
        method, arguments = asked
        found = getattr(self._made.result(), method)(*arguments)
        if inspect.iscoroutine(found):
            return asyncio.run_coroutine_threadsafe(found, self._loop).result()
        return found

    def place(self) -> HostAddress:
        """Where the object is, once it is there."""
        self._made.result()
        return self.process()

    def process(self) -> HostAddress:
        """Where its process is."""
        node = require("ray", "cluster").get_runtime_context().get_node_id()
        return HostAddress(os.getpid(), socket.gethostname(), node)


def _leave(why: str) -> None:
    """End this process at once, whatever its threads do."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def _was_restarted() -> bool:
    with warnings.catch_warnings():  # what Ray calls here it calls deprecated itself
        warnings.simplefilter("ignore")
        return bool(require("ray", "cluster").get_runtime_context().was_current_actor_reconstructed)
