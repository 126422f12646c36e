"""An engine without Ray: each object in threads of its own, which can die as a process does.

Nothing of a host that died goes on: its threads stand still, without an exception, so that no ``finally``
runs and files stay as they are, as when a process is killed. In the end ``release`` ends them.
"""

import asyncio
import atexit
import copy
import inspect
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from onward.fleet.link import Unreachable

AWAY = 0.05  # seconds until one that was lost is started again
LAST = 10.0  # seconds that threads have to end
HERE = threading.local()
DEAD = []


class Released(SystemExit):
    """Ends the threads of a host that died; an event loop lets no other exception through."""


def here():
    """The host whose thread this is; None outside."""
    return getattr(HERE, "host", None)


def stand_still():
    """What becomes of the threads of a host that died."""
    here().over.wait()
    raise Released


def release():
    """End the threads of all hosts that died, and let go of what they hold."""
    hosts = {DEAD.pop() for _ in range(len(DEAD))}
    for host in hosts:
        host.over.set()
    for thread in threading.enumerate():
        if getattr(thread, "host", None) in hosts:
            thread.join(LAST)


class Helper(threading.Thread):
    """A thread that a host begins: it stands still with it."""

    def __init__(self, *, target, args, name):
        super().__init__(target=target, args=args, name=name)
        self.host, self.background = here(), target.__self__

    def run(self):
        HERE.host = self.host
        super().run()
        if isinstance(self.background._error, Released):
            atexit.unregister(self.background._report)


class Host:
    """One hosted object and its event loop."""

    def __init__(self, engine, number, factory, arguments):
        self.engine, self.number = engine, number
        self.factory, self.arguments = factory, arguments
        self.alive, self.stopped = True, False
        self.over, self.lock = threading.Event(), threading.Lock()
        self.open = set()
        self.loop = asyncio.new_event_loop()
        self.hosted = Future()
        self.start(self.serve)
        self.start(self.make)

    def start(self, function, *arguments):
        def run():
            HERE.host = self
            with suppress(Released):
                function(*arguments)

        thread = threading.Thread(target=run, daemon=True)
        thread.host = self
        thread.start()

    def serve(self):
        with suppress(Released):
            self.loop.run_forever()
        while self.loop._ready or asyncio.all_tasks(self.loop):
            self.turn()
        self.loop.close()

    def turn(self):
        """What is ready, once, and nobody waits on for anything."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)
        with suppress(Released):
            self.loop.run_forever()

    def make(self):
        try:
            self.hosted.set_result(self.factory(*self.arguments))
        except BaseException as error:
            self.hosted.set_exception(error)

    def call(self, method, arguments):
        result = Future()
        self.open.add(result)
        if not self.alive:
            self.fail(result)
        self.start(self.run, method, arguments, result)
        return result

    def run(self, method, arguments, result):
        try:
            function = getattr(self.hosted.result(), method)
            if inspect.iscoroutinefunction(function):
                found = self.begin(function, arguments).result()
            else:
                found = function(*arguments)
            self.settle(result, found, None)
        except BaseException as error:
            self.settle(result, None, error)
        if method == self.engine.dies_after:
            self.engine.lose(self)

    def begin(self, function, arguments):
        """A call that waits on the event loop, which is open as long as the host is alive."""
        with self.lock:
            pending = self.alive and asyncio.run_coroutine_threadsafe(
                self.wait(function, arguments), self.loop
            )
        return pending or stand_still()

    async def wait(self, function, arguments):
        if not self.alive:
            stand_still()
        return await function(*arguments)

    def settle(self, result, found, error):
        if self.stopped and self.alive:
            return
        self.open.discard(result)
        if not self.alive:
            error = Unreachable("it was killed")
        with suppress(InvalidStateError):
            result.set_exception(error) if error else result.set_result(copy.deepcopy(found))

    def fail(self, result):
        with suppress(InvalidStateError):
            result.set_exception(Unreachable("it was killed"))

    def die(self):
        with self.lock:
            if not self.alive:
                return
            self.alive = False
            self.loop.call_soon_threadsafe(stand_still)
        for result in list(self.open):
            self.fail(result)
        DEAD.append(self)


class Call:
    def __init__(self, future):
        self.future = future

    def result(self, timeout=None):
        try:
            return self.future.result(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            raise error from None

    def done(self):
        return self.future.done()


class ThreadLink:
    def __init__(self, engine, number):
        self.engine, self.number = engine, number

    def call(self, method, *arguments):
        host = self.engine.hosts[self.number]
        if here() is not None and not here().alive:
            stand_still()
        if not host.alive:
            raise Unreachable("it is dead")
        return Call(host.call(method, arguments))


class Threads:
    """The engine."""

    def __init__(self):
        self.hosts, self.restarts, self.open = [], [], True
        self.dies_after = None  # the name of a method

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.open = False
        for host in self.hosts:
            if host.alive:
                host.die()

    def spawn(self, factory, *arguments, name, restart=False, options=None):
        self.restarts.append(restart)
        self.hosts.append(Host(self, len(self.hosts), factory, arguments))
        return ThreadLink(self, len(self.hosts) - 1)

    def kill(self, link, restart=False):
        host = self.hosts[link.number]
        host.die()
        if restart:
            self.start_again(host)

    def lose(self, host):
        """A host dies by itself; one that is to start again does so after a while."""
        host.die()
        if self.restarts[host.number]:
            timer = threading.Timer(AWAY, self.start_again, [host])
            timer.daemon = True
            timer.start()

    def start_again(self, host):
        if self.open and self.hosts[host.number] is host:
            self.hosts[host.number] = Host(self, host.number, host.factory, host.arguments)
