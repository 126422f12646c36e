"""Metrics that are counted while requests are answered, in the text format of Prometheus.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/

>>> counts = Counters()
>>> counts.add("onward_requests_total", route="/predict", status="200")
>>> print(counts.text().splitlines()[2])
onward_requests_total{route="/predict",status="200"} 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from threading import Lock

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COUNTERS: Mapping[str, str] = {
    "onward_requests_total": "Requests answered, by route and status.",
    "onward_refused_total": "Requests that were not computed because the server was busy or ended.",
    "onward_rows_total": "Examples computed.",
    "onward_padding_total": "Rows computed only to fill a batch.",
    "onward_reloads_total": "Models exchanged, by result.",
}
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "onward_request_seconds": ("From the arrival of a request to its answer.", _SECONDS),
    "onward_compute_seconds": ("How long batches were computed.", _SECONDS),
    "onward_batch_rows": ("Examples in a batch.", _ROWS),
    "onward_batch_requests": ("Requests in a batch.", _ROWS),
}
Labels = tuple[tuple[str, str], ...]


class Counters:
    """Counters and histograms that any thread may add to."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms = {name: _Buckets(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count something."""
        key = name, tuple(labels.items())
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._histograms[name].add(value)

    def total(self, name: str) -> float:
        """The total of a counter over all its labels."""
        with self._lock:
            return sum(amount for (known, _), amount in self._counters.items() if known == name)

    def text(self, **gauges: tuple[float, str]) -> str:
        """Everything counted so far, and some values as they are now, each with what it means."""
        with self._lock:
            lines = [line for name, about in _COUNTERS.items() for line in self._counter(name, about)]
            for name, (about, _) in _HISTOGRAMS.items():
                lines += [*_head(name, about, "histogram"), *self._histograms[name].lines(name)]
        for name, (value, about) in gauges.items():
            lines += [*_head(name, about, "gauge"), f"{name} {value:g}"]
        return "\n".join(lines) + "\n"

    def _counter(self, name: str, about: str) -> list[str]:
        known = sorted((labels, amount) for (n, labels), amount in self._counters.items() if n == name)
        return [
            *_head(name, about, "counter"),
            *(f"{name}{_braces(ls)} {amount:.15g}" for ls, amount in known),
        ]


class _Buckets:
    """How many values lay below each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        below = 0
        lines = []
        for bound, count in zip([f"{b:g}" for b in self.bounds] + ["+Inf"], self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self.sum:.9g}", f"{name}_count {below}"]


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
