"""The schedule of a pipeline as a picture: a row for each stage, a cell for each task, time to the right.

>>> from onward.distribute.pipeline.schedule import schedule_of
>>> schedule_svg(schedule_of("1f1b", stages=2, micro_batches=3)).count("<title>")
12
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onward.distribute.pipeline.schedule import Moment, PipelineSchedule, StageWork
from onward.explain.style import FONT, colour, text, with_plain_colours

_WORDS: Mapping[StageWork, tuple[str, str]] = {
    StageWork.FORWARD: ("forward", "forward pass"),
    StageWork.BACKWARD: ("backward", "backward pass"),
    StageWork.WEIGHTS: ("update", "weight gradients"),
}
_LEFT, _TOP, _ROW, _HIGH, _RIGHT = 76, 50, 32, 26, 150
_WIDEST, _ACROSS, _LETTER, _NARROWEST = 30, 1200, 7, 520
_STYLE = f"""
.ow-schedule text {{ font-family: {FONT}; font-size: 12px; fill: var(--ow-text); }}
.ow-schedule .title {{ font-size: 14px; font-weight: 600; }}
.ow-schedule .faint {{ fill: var(--ow-faint); }}
.ow-schedule .task {{ font-size: 11px; text-anchor: middle; }}
"""


def schedule_svg(schedule: PipelineSchedule) -> str:
    """The picture as a file of its own, light and dark; what is empty in a row is the time that it waits."""
    unit = min(_WIDEST, _ACROSS / schedule.span)
    right, below = _LEFT + schedule.span * unit, _TOP + schedule.stages * _ROW
    width, height = max(round(right + _RIGHT), _NARROWEST), below + 40
    letters = len(f"F{schedule.micro_batches - 1}")
    parts = [
        '<rect width="100%" height="100%" style="fill:var(--ow-page)"/>',
        f'<text class="title" x="14" y="28">{text(str(schedule).splitlines()[0])}</text>',
        *(_row(schedule, stage, right) for stage in range(schedule.stages)),
        *(_cell(moment, unit, letters) for moment in schedule.moments),
        *_legend(schedule, below + 24),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ow-schedule" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
        f"{with_plain_colours(_STYLE, ''.join(parts), 'ow-schedule')}</svg>\n"
    )


def _row(schedule: PipelineSchedule, stage: int, right: float) -> str:
    y = _TOP + stage * _ROW
    held, idle, wide = schedule.held[stage], 100 * schedule.idle_stages[stage], right - _LEFT
    return (
        f'<rect x="{_LEFT}" y="{y}" width="{wide:.1f}" height="{_HIGH}" style="fill:var(--ow-panel)"/>'
        f'<text x="14" y="{y + 17}">stage {stage}</text>'
        f'<text class="faint" x="{right + 12:.1f}" y="{y + 17}">holds {held}, idle {idle:.0f} %</text>'
    )


def _cell(moment: Moment, unit: float, letters: int) -> str:
    """A task as a cell; it says which one it is where all have room, and where a pointer stands on it."""
    begin, end, stage, task = moment
    x, y, wide = _LEFT + begin * unit, _TOP + stage * _ROW, (end - begin) * unit
    name, words = _WORDS[task.work]
    fits = wide > _LETTER * letters + 2
    told = f'<text class="task" x="{x + wide / 2:.1f}" y="{y + 17}">{task}</text>' if fits else ""
    gap = min(1, wide / 4)
    return (
        f"<g><title>{words} of micro-batch {task.micro_batch} in stage {stage}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{wide - gap:.1f}" height="{_HIGH}" rx="2" '
        f'style="fill:{colour(name, soft=True)};stroke:{colour(name)}"/>{told}</g>'
    )


def _legend(schedule: PipelineSchedule, y: int) -> Iterator[str]:
    x = _LEFT
    for work in dict.fromkeys(task.work for task in schedule.orders[0]):
        name, words = _WORDS[work]
        yield (
            f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" '
            f'style="fill:{colour(name, soft=True)};stroke:{colour(name)}"/>'
            f'<text x="{x + 17}" y="{y}">{work}: {words}</text>'
        )
        x += 44 + 7 * len(words)
