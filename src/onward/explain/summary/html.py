"""A summary as a table for a notebook: passes in colour, bars behind the numbers, sorted at a click."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from onward.explain.style import CSS, MONO, colour, text
from onward.explain.summary.rows import SummaryRow
from onward.explain.summary.words import HEADS, NUMBERS, cell, shown_columns

_CSS = f"""
.ow-summary {{ border-collapse: collapse; font-size: 13px; margin: 8px 0; }}
.ow-summary th, .ow-summary td {{ padding: 3px 12px; text-align: left; border: 0; white-space: nowrap; }}
.ow-summary th {{ color: var(--ow-faint); font-weight: 500; border-bottom: 1px solid var(--ow-line); }}
.ow-summary th[data-by] {{ cursor: pointer; text-align: right; }}
.ow-summary th[data-by]:hover, .ow-summary th.ow-first {{ color: var(--ow-text); }}
.ow-summary td.ow-number {{ font-family: {MONO}; font-size: 12px; text-align: right; }}
.ow-summary td.ow-scope {{ font-weight: 600; }}
.ow-summary td.ow-output {{ font-family: {MONO}; font-size: 12px; color: var(--ow-faint); }}
.ow-summary tbody tr:first-child td {{ border-top: 1px solid var(--ow-line); }}
.ow-summary tbody, .ow-summary tr, .ow-summary td {{ background-color: transparent; }}
.ow-summary tfoot tr:first-child td {{ border-top: 2px solid var(--ow-faint); }}
.ow-summary tfoot td {{ font-weight: 600; }}
.ow-summary-title {{ font-weight: 600; padding: 8px 12px 0; }}
.ow-summary-note {{ color: var(--ow-faint); font-size: 12px; padding: 0 12px 8px; }}
"""
_SORT = """
(() => {
  const table = document.currentScript.previousElementSibling.querySelector("table");
  const asked = [...table.querySelectorAll("th[data-by]")];
  const amount = (body, i) => [...body.rows].reduce((sum, row) => sum + Number(row.cells[i].dataset.n), 0);
  const order = [...table.tBodies];
  for (const head of asked) head.onclick = () => {
    const back = head.classList.contains("ow-first");
    asked.forEach(other => other.classList.toggle("ow-first", other === head && !back));
    const i = head.cellIndex;
    const bodies = back ? order : [...order].sort((a, b) => amount(b, i) - amount(a, i));
    bodies.forEach(body => table.insertBefore(body, table.tFoot));
  };
})();
"""


def html_of(
    title: str, rows: Sequence[SummaryRow], totals: Sequence[SummaryRow], notes: Sequence[str]
) -> str:
    """The table as HTML that needs nothing from elsewhere."""
    names = shown_columns(totals)
    most = {name: max((getattr(row, name) for row in rows), default=0) for name in names if name in NUMBERS}
    bodies = "".join(
        f"<tbody>{''.join(_lines(list(group), names, most))}</tbody>"
        for _, group in groupby(rows, lambda row: row.scope)
    )
    ends = "".join(_lines(list(totals), names, {}))
    below = "".join(f'<div class="ow-summary-note">{text(note)}</div>' for note in notes)
    return (
        f'<div class="onward"><style>{CSS}{_CSS}</style><div class="ow-summary-title">{text(title)}</div>'
        f'<table class="ow-summary"><thead><tr>{"".join(map(_head, names))}</tr></thead>{bodies}'
        f"<tfoot>{ends}</tfoot></table>{below}</div><script>{_SORT}</script>"
    )


def _head(name: str) -> str:
    asks = f' data-by="{name}" title="sort by this"' if name in NUMBERS else ""
    return f"<th{asks}>{text(HEADS[name])}</th>"


def _lines(rows: list[SummaryRow], names: Sequence[str], most: dict[str, int]) -> Iterator[str]:
    """The lines of one scope, which names it once."""
    for i, row in enumerate(rows):
        yield f"<tr>{''.join(_cell(row, name, most.get(name, 0), i == 0) for name in names)}</tr>"


def _cell(row: SummaryRow, name: str, most: int, first: bool) -> str:
    if name == "scope":
        return f'<td class="ow-scope">{text(cell(row, name)) if first else ""}</td>'
    if name == "made_by":
        shade = colour(row.made_by) if row.made_by is not None else "inherit"
        return f'<td style="color: {shade}">{text(cell(row, name))}</td>'
    if name == "output":
        return f'<td class="ow-output">{text(cell(row, name))}</td>'
    amount = getattr(row, name)
    bar = _bar(row, amount / most) if most and amount else ""
    return f'<td class="ow-number" data-n="{amount * row.times}"{bar}>{text(cell(row, name))}</td>'


def _bar(row: SummaryRow, share: float) -> str:
    """A bar behind a number, as long as its share of the largest in the column."""
    shade = colour(row.made_by or "state", soft=True)
    end = f"{100 * share:.0f}%"
    return f' style="background-image: linear-gradient(to left, {shade} {end}, transparent {end})"'
