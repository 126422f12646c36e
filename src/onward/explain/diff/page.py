"""A diff as a page of text, in the manner of a Program's listing, or in colours for a notebook."""

from __future__ import annotations

from onward.core.show import human_bytes
from onward.core.words import Pass
from onward.explain.diff.changes import Changes
from onward.explain.diff.lines import ChangeLine, headline, lines
from onward.explain.style import CSS, MONO, colour
from onward.explain.style import text as escaped

_MOST = 60
_WIDEST = 150
_TYPES = 24
_RULE = 86
_COLOURS = {"+": "var(--ow-update)", "-": "var(--ow-alarm)", "~": "var(--ow-backward)"}
_CSS = f"""
.ow-diff {{ font-family: {MONO}; font-size: 12px; line-height: 1.5; border-spacing: 0; margin: 6px 0; }}
.ow-diff td {{ padding: 1px 12px 1px 0; text-align: left; vertical-align: top; border: 0; background: none;
  color: var(--ow-text); white-space: pre-wrap; }}
.ow-diff tr {{ background: none; }}
.ow-diff td:first-child, .ow-diff td.ow-type {{ white-space: pre; }}
.ow-diff td.ow-type {{ color: var(--ow-faint); }}
.ow-diff tr.ow-rule td {{ border-top: 1px solid var(--ow-line); }}
.ow-diff-head {{ font-weight: 600; padding: 8px 0 2px; }}
.ow-diff-note {{ color: var(--ow-faint); font-size: 12px; }}
"""


def text(found: Changes) -> str:
    """The page as text."""
    blocks = [block for block in lines(found) if block]
    every = [line for block in blocks for line in block]
    margin = max((len(line.margin) for line in every), default=0)
    times = max((len(line.times) for line in every), default=0)
    types = min(_TYPES, max((len(line.type) for line in every), default=0))
    rows: list[str] = []
    for block in blocks:
        rows.append(f"{'─' * (margin + 1)}┼{'─' * _RULE}" if rows else "")
        before = ""
        for line in block:
            about = line.margin if line.margin != before else ""
            kinds, words = _cut(line.type, types), _cut(line.text, _WIDEST)
            rows.append(f"{about:<{margin}} │ {line.times:<{times}}  {kinds:<{types}}  {words}".rstrip())
            before = line.margin
    if len(rows) > _MOST:
        rows = [*rows[:_MOST], f"... and {len(rows) - _MOST:,} more lines"]
    return "\n".join([headline(found), *rows, *([""] if rows else []), costs(found)])


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 3]}..."


def costs(found: Changes) -> str:
    """The costs of both Programs and the number of unchanged ops, as a line of text."""
    told = [f"{len(found.same):,} ops as before"]
    for what, pair in found.costs.items():
        if any(pair):
            old, new = (f"{n:,}" if what == "operations" else human_bytes(n) for n in pair)
            told.append(f"{what} {old} -> {new}" if old != new else f"{what} {old} still")
    return "; ".join(told)


def html(found: Changes) -> str:
    """The page in colours."""
    rows: list[str] = []
    for block in (block for block in lines(found) if block):
        before = ""
        for line in block:
            rows.append(_row(line, line.margin != before, is_rule=bool(rows) and not before))
            before = line.margin
    return (
        f'<div class="onward"><style>{CSS}{_CSS}</style>'
        f'<div class="ow-diff-head">{escaped(headline(found))}</div>'
        f'<table class="ow-diff">{"".join(rows)}</table>'
        f'<div class="ow-diff-note">{escaped(costs(found))}</div></div>'
    )


def _row(line: ChangeLine, is_named: bool, is_rule: bool) -> str:
    ink = colour(line.margin) if line.margin in set(Pass) else "var(--ow-faint)"
    rule = ' class="ow-rule"' if is_rule else ""
    about = escaped(line.margin) if is_named else ""
    return (
        f'<tr{rule}><td style="color: {ink}">{about}</td>'
        f'<td style="color: {_COLOURS[line.mark]}; white-space: pre">{escaped(line.times)}</td>'
        f'<td class="ow-type">{escaped(_cut(line.type, _TYPES))}</td><td>{escaped(line.text)}</td></tr>'
    )
