"""An engine without Ray: each object in a thread of its own, with calls that can be cut."""

import asyncio
import copy
import inspect
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from onward.execute.cluster.engine import Unreachable


class Host:
    """One hosted object and its event loop."""

    def __init__(self, factory, arguments):
        self.factory, self.arguments = factory, arguments
        self.alive = True
        self.pool = ThreadPoolExecutor(16)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.hosted = self.pool.submit(factory, *arguments)
        self.open = set()

    def call(self, method, arguments):
        result = Future()
        self.open.add(result)
        self.pool.submit(self.run, method, arguments, result)
        return result

    def run(self, method, arguments, result):
        try:
            function = getattr(self.hosted.result(), method)
            if inspect.iscoroutinefunction(function):
                found = asyncio.run_coroutine_threadsafe(function(*arguments), self.loop).result()
            else:
                found = function(*arguments)
            self.settle(result, found, None)
        except BaseException as error:
            self.settle(result, None, error)

    def settle(self, result, found, error):
        self.open.discard(result)
        if result.done():
            return
        if not self.alive:
            error = Unreachable("it was killed")
        result.set_exception(error) if error else result.set_result(copy.deepcopy(found))

    def die(self):
        self.alive = False
        for result in list(self.open):
            if not result.done():
                result.set_exception(Unreachable("it was killed"))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.pool.shutdown(wait=False, cancel_futures=True)


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
        if not host.alive:
            raise Unreachable("it is dead")
        return Call(host.call(method, arguments))


class Threads:
    """The engine."""

    def __init__(self):
        self.hosts, self.restarts = [], []

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for host in self.hosts:
            if host.alive:
                host.die()

    def spawn(self, factory, *arguments, name, restart=False, options=None):
        self.hosts.append(Host(factory, arguments))
        self.restarts.append(restart)
        return ThreadLink(self, len(self.hosts) - 1)

    def kill(self, link, restart=False):
        host = self.hosts[link.number]
        host.die()
        if restart:
            self.hosts[link.number] = Host(host.factory, host.arguments)
