"""A background thread that reads ahead of a loop.

>>> for item in prefetched(iter("abc"), 2, str.upper):
...     print(item)
A
B
C
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, TypeVar

from onward.core.errors import ArgumentError

T = TypeVar("T")
END: Any = object()  # what an exhausted iterator gives
PATIENCE = 5.0  # seconds to wait for a read that is under way when nobody wants it any more
MOMENT = 0.25  # seconds between two calls of ``meanwhile``


def prefetched(
    iterator: Iterator[T],
    size: int,
    place: Callable[[T], T],
    meanwhile: Callable[[], None] | None = None,
) -> Generator[T, None, None]:
    """Read ahead in one background thread.

    Leaving the loop early (break, an exception, ``close``) ends the thread.

    Args:
        iterator: what to read.
        size: how many items to hold ready; 0 reads without a thread.
        place: what the thread does with each item, for instance ``jax.device_put``. Where the iterator fills
            the same array again and again, it has to copy; so does ``train``.
        meanwhile: called now and then by the thread that waits; what it raises ends the loop.

    Raises:
        Exception: what ``iterator`` or ``place`` raises, after the items that came before.

    Example:
        >>> list(prefetched(iter([1, 2, 3]), 2, lambda x: 10 * x))
        [10, 20, 30]
    """
    if size < 0:
        raise ArgumentError(f"prefetched: size is {size}; expected how many items to read ahead, at least 0.")
    if not size:
        return (place(item) for item in iterator)
    return _consumed(_Ahead(iterator, size, place), meanwhile)


class _Ahead(Generic[T]):
    """The state that the thread and its consumer share.

    A free place is a True in ``places``, so that the thread waits only for its consumer and never to hand
    something over. Both queues are C: an interrupt cannot leave a lock behind, as in ``queue.Queue``.
    """

    def __init__(self, iterator: Iterator[T], size: int, place: Callable[[T], T]) -> None:
        self.iterator, self.place = iterator, place
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.places: SimpleQueue[bool] = SimpleQueue()
        self.wanted = True
        for _ in range(size):
            self.places.put(True)

    def read(self) -> None:
        """The thread."""
        try:
            while self.places.get() and self.wanted:
                item = next(self.iterator, END)
                self.items.put((item if item is END else self.place(item), None))
                if item is END:
                    return
        except BaseException as error:
            self.items.put((END, error))

    def next(self, meanwhile: Callable[[], None] | None) -> tuple[Any, BaseException | None]:
        """Wait for what was read next."""
        while meanwhile is not None:
            try:
                return self.items.get(timeout=MOMENT)
            except Empty:
                meanwhile()
        return self.items.get()


def _consumed(ahead: _Ahead[T], meanwhile: Callable[[], None] | None) -> Generator[T, None, None]:
    thread = Thread(target=ahead.read, name="onward-prefetch", daemon=True)
    try:
        thread.start()
        while True:
            item, error = ahead.next(meanwhile)
            if error is not None:
                raise error
            if item is END:
                return
            ahead.places.put(True)
            yield item
    finally:
        ahead.wanted = False
        ahead.places.put(False)
        if thread.is_alive() and thread is not current_thread():
            thread.join(PATIENCE)
