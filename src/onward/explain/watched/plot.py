"""A picture of what ``watch`` recorded: a panel for each statistic, lines for a few things, a map for many.

In a map each row is one thing that is watched, in the order of the network, and time runs to the right: where
gradients vanish or explode along the depth is seen at a glance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any

import numpy as np

from onward.core.extras import require
from onward.develop.watch.statistics import HISTOGRAM, SCALARS
from onward.execute.loop.watch_history import WatchHistory
from onward.explain.style import DARK, LIGHT
from onward.explain.watched.moments import Source, chosen, watched_steps

_LINES = 6  # up to so many things are lines, of which one can still tell the colours apart
_COLOURS = ("forward", "backward", "update", "collective", "alarm", "state")
_SIGNED = ("mean", "min", "max")
_SHARES = ("zeros", "nonfinite")
_SHOWN = ("norm", "ratio", "zeros", "nonfinite")
_PASS_OF = {"value": "forward", "gradient": "backward", "update": "update"}  # of whose colour a map is
_WORDS = {"value": "values", "gradient": "gradients", "update": "updates"}


def plot_watched(
    source: Source,
    names: str | Iterable[str] | None = None,
    statistics: str | Iterable[str] | None = None,
    dark: bool = False,
) -> Any:
    """A picture of what was watched over a training.

    Args:
        source: ``trainer.history``, a ``WatchHistory``, or a list of ``out.watched``.
        names: what to show, by name or pattern, such as ``"grad(*)"``; all unless given.
        statistics: which; unless given the norm, the ratio, the shares that are not 0 throughout,
            histograms and statistics of your own. A histogram is drawn for each thing by itself.
        dark: light colours on a dark ground.

    Returns:
        A matplotlib ``Figure``: ``figure.savefig("watched.svg")``; a notebook shows it.

    Raises:
        ArgumentError: nothing was watched.
        UnknownNameError: a name or statistic that is not there.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> step = ow.compile(ow.watch(program, gradients=True, statistics="norm", every=1))
        >>> state, outs = step.run(step.init(jnp.ones(2)), [()] * 3)
        >>> figure = plot_watched(outs.watched)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['norm of grad(w)']
    """
    history = watched_steps(source)
    figures = require("matplotlib.figure", "plot")
    labels = chosen(history.labels, names, "plot_watched, names")
    shown = _statistics(history, labels, statistics)
    panels = [(s, group) for s in shown for group in _groups(history, labels, s)]
    if statistics is None:
        panels = [(s, g) for s, g in panels if s not in _SHARES or _tells(history, g, s)] or panels
    theme = DARK if dark else LIGHT
    heights = [_height(s, group) for s, group in panels]
    figure = figures.Figure(figsize=(8.5, sum(heights) + 0.2), facecolor=theme["page"], layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axes, (statistic, group) in zip(every, panels, strict=True):
        _panel(axes, history, statistic, group, theme)
    every[-1].set_xlabel("step", color=theme["faint"])
    figure._repr_svg_ = partial(_svg, figure)  # a notebook asks what can draw itself
    return figure


def _svg(figure: Any) -> str:
    """A figure as the text of an SVG."""
    written = StringIO()
    figure.savefig(written, format="svg", facecolor=figure.get_facecolor())
    return written.getvalue()


def _statistics(history: WatchHistory, labels: Sequence[str], asked: Any) -> tuple[str, ...]:
    """Which statistics to show: those asked for, or the ones that say something."""
    known = history.statistics
    if asked is not None:
        return chosen(known, asked, "plot_watched, statistics")
    rest = [s for s in known if s not in SCALARS]
    telling = [s for s in _SHOWN if s in known and (s not in _SHARES or _tells(history, labels, s))]
    return (*telling, *rest) or known


def _tells(history: WatchHistory, labels: Sequence[str], statistic: str) -> bool:
    return any(m.seen.get(label, {}).get(statistic) for m in history for label in labels)


def _groups(history: WatchHistory, labels: Sequence[str], statistic: str) -> list[list[str]]:
    """The things that share a panel: those of one role if they are many; of histograms each has its own."""
    here = [label for label in labels if any(statistic in m.seen.get(label, {}) for m in history)]
    if statistic == HISTOGRAM:
        return [[label] for label in here]
    if len(here) <= _LINES:
        return [here] if here else []
    found: dict[str, list[str]] = {}
    for label in here:
        found.setdefault(history.subjects[label][0], []).append(label)
    return list(found.values())


def _height(statistic: str, group: Sequence[str]) -> float:
    """How many inches a panel takes."""
    return max(1.9, 0.55 + 0.19 * len(group)) if len(group) > _LINES else 1.9


def _panel(
    axes: Any, history: WatchHistory, statistic: str, group: Sequence[str], theme: Mapping[str, str]
) -> None:
    """One statistic of some things."""
    _dress(axes, theme)
    roles = {history.subjects[label][0] for label in group}
    of = group[0] if len(group) == 1 else _WORDS[next(iter(roles))] if len(roles) == 1 else "all"
    title = statistic if of == "all" else f"{statistic} of {of}"
    axes.margins(x=0)
    axes.set_title(title, loc="left", color=theme["text"], fontsize=11, fontweight="bold")
    if statistic == HISTOGRAM:
        hue = theme[_PASS_OF[history.subjects[group[0]][0]]]
        _draw_histogram(axes, *history.of(group[0], statistic), (theme["page"], hue, theme["text"]))
    elif len(group) > _LINES:
        _draw_map(axes, history, statistic, group, theme)
    else:
        _draw_lines(axes, history, statistic, group, theme)


def _draw_lines(
    axes: Any, history: WatchHistory, statistic: str, group: Sequence[str], theme: Mapping[str, str]
) -> None:
    everything = []
    for label, name in zip(group, _COLOURS, strict=False):
        steps, values = history.of(label, statistic)
        mark = "o" if len(steps) < 30 else None
        axes.plot(steps, values, color=theme[name], label=label, linewidth=1.6, marker=mark, markersize=3)
        everything.append(values)
    numbers = np.concatenate(everything)
    if statistic not in (*_SIGNED, *_SHARES) and np.all(numbers > 0):
        axes.set_yscale("log")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.03), frameon=False, labelcolor=theme["text"], fontsize=8
    )


def _draw_map(
    axes: Any, history: WatchHistory, statistic: str, group: Sequence[str], theme: Mapping[str, str]
) -> None:
    """Steps to the right, things downwards, the number as a colour."""
    steps = np.array([m.step for m in history])
    numbers = np.array([[m.seen.get(g, {}).get(statistic, np.nan) for m in history] for g in group], float)
    colours = require("matplotlib.colors", "plot")
    good = numbers[np.isfinite(numbers)]
    norm: Any = None
    if statistic in _SIGNED and good.size:
        far = float(np.abs(good).max()) or 1.0
        norm, scale = colours.Normalize(-far, far), (theme["forward"], theme["page"], theme["backward"])
    else:
        hue = _PASS_OF[history.subjects[group[0]][0]]
        scale = (theme[f"{hue}-soft"], theme[hue], theme["text"])
        positive = good[good > 0]
        if statistic not in _SHARES and positive.size and positive.max() > 20 * positive.min():
            norm = colours.LogNorm(positive.min(), positive.max())
    shades = colours.LinearSegmentedColormap.from_list("watched", scale)
    shades.set_bad(theme["line"])
    edges = _between(steps)
    mesh = axes.pcolormesh(edges, np.arange(len(group) + 1), numbers, norm=norm, cmap=shades)
    axes.set_ylim(len(group), 0)
    axes.set_yticks(np.arange(len(group)) + 0.5, group, fontsize=7.5)
    axes.grid(False)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, aspect=30)
    bar.ax.tick_params(which="both", colors=theme["faint"], labelsize=7.5)
    bar.outline.set_visible(False)


def _draw_histogram(axes: Any, steps: np.ndarray, found: np.ndarray, scale: tuple[str, ...]) -> None:
    """Steps to the right, values upwards, the darker the more numbers."""
    colours = require("matplotlib.colors", "plot")
    shades = colours.LinearSegmentedColormap.from_list("watched", scale)
    bounds = _between(steps)
    most = max(float((h.counts / max(h.counts.sum(), 1)).max()) for h in found)
    for left, right, h in zip(bounds[:-1], bounds[1:], found, strict=True):
        shares = (h.counts / max(h.counts.sum(), 1))[:, None]
        edges = h.edges if h.high > h.low else h.low + np.linspace(-1e-6, 1e-6, len(h.edges))
        axes.pcolormesh([left, right], edges, np.sqrt(shares), vmin=0, vmax=np.sqrt(most), cmap=shades)
    axes.grid(False)


def _between(steps: np.ndarray) -> np.ndarray:
    """The edges of columns of which each begins at its step."""
    if len(steps) == 1:
        return np.array([steps[0], steps[0] + 1])
    return np.append(steps, 2 * steps[-1] - steps[-2])


def _dress(axes: Any, theme: Mapping[str, str]) -> None:
    """The ground, the lines and the letters of a panel."""
    axes.set_facecolor(theme["page"])
    axes.grid(True, color=theme["line"], linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme["faint"], labelcolor=theme["text"], labelsize=8, length=3)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme["line"])
