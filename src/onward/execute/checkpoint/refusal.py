"""The messages that refuse a folder: another writes there, or it holds another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onward.execute.checkpoint.archive import FoundFolder, newest_first
from onward.execute.checkpoint.identity import moment
from onward.execute.disk.lock import ProcessName


def of_another_writer(folder: Path, holder: ProcessName | None) -> str:
    """The message for a folder that another process writes to, or another store of this process."""
    if holder is None:
        return HELD.format(folder=folder, who="another process", out="Wait until it has ended")
    pid, since = holder.pid, moment(holder.since)
    if holder.is_own:
        return HELD.format(folder=folder, who=f"this process (pid {pid}), since {since}", out=HERE)
    who = f"process {pid} on {holder.host}, since {since}"
    return HELD.format(folder=folder, who=who, out=f"Wait until it has ended, or end it (kill {pid})")


def of_another_run(folder: Path, found: Sequence[FoundFolder]) -> str:
    """The message for a folder that holds another run: its contents, and both ways out."""
    placed = [f.place[1] for f in reversed(newest_first(found)) if f.place is not None]
    steps = [str(step) for step in placed] or ["unknown"]
    listed = ", ".join(steps if len(steps) < 8 else [*steps[:3], "...", *steps[-3:]])
    begun = next((f.manifest.identity.begun for f in newest_first(found) if f.manifest), "")
    return OTHER.format(
        folder=folder,
        count=f"{len(found)} checkpoint{'s' * (len(found) > 1)}",
        steps=f"step{'s' * (len(steps) > 1)} {listed}",
        begun=f"it began {begun}, and the" if begun else "the",
        last=moment(max(f.time for f in found) / 1e9),
    )


OTHER = (
    "{folder} holds {count} of another run, of {steps}; {begun} last was written {last}. Nothing was "
    "changed. To go on with that run: train(..., resume=True), trainer.restore(), or load() before the "
    "first save. To begin another one: another folder."
)
HELD = (
    "{folder} is being written by {who}. A folder has one writer at a time; nothing was changed. {out}; or "
    "write to another folder."
)
HERE = (
    "It is another Checkpoints of the same folder: use that one, or let it go (the end of its `with` block, "
    "or `del`)"
)
NO_LOCKS = (
    "{folder} lies where no file can be locked ({error}): see to it yourself that only one process writes "
    "there."
)
