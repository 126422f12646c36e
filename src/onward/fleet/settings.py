"""How a training on a cluster is set up, and the folder where its records are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.core.errors import ArgumentError, ClusterError
from onward.core.structure import expect_count
from onward.distribute.split.devices import TrainerDevices
from onward.execute.disk.durable import appearing, sync
from onward.fleet.faults import Faults
from onward.fleet.keeper import Durability
from onward.fleet.modes import Local, Mode, in_rounds
from onward.fleet.supervisor import START


@dataclass(frozen=True)
class Settings:
    """How a training on a cluster is set up; see ``train``. ``batch`` is the data that is as long as it."""

    trainers: int
    servers: int
    mode: Mode
    epochs: int = 1
    sums: bool = False
    batch: str | None = None
    lazy: tuple[str, ...] = ()
    rows: bool = True
    durability: Durability = field(default_factory=Durability)
    folder: str | None = None
    deadline: float = 60.0
    restarts: int = 3
    start_limit: float = START
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    devices: TrainerDevices | None = None
    takes_all: bool = False
    progress: bool | None = None
    check: bool = True
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for what, count in (("trainers", self.trainers), ("servers", self.servers), ("epochs", self.epochs)):
            expect_count(count, f"cluster: {what}", of="how many")
        expect_count(self.restarts, "cluster: restarts", 0, "how many")
        for what, seconds in (("deadline", self.deadline), ("start_limit", self.start_limit)):
            if not (isinstance(seconds, int | float) and seconds > 0):
                raise ArgumentError(f"cluster: {what} is {seconds!r}; expected seconds, more than 0.")
        if self.lazy and isinstance(self.mode, Local):
            raise ArgumentError(
                "cluster: with Local a trainer makes its own updates; tables travel whole. Leave lazy= out."
            )

    @property
    def merged(self) -> int:
        """How many gradients one update merges."""
        return self.trainers if in_rounds(self.mode) else 1

    @property
    def patience(self) -> float:
        """Seconds that a server is waited for: as many as it takes to miss it, and to start it again."""
        return 2 * self.deadline + self.start_limit

    @property
    def outer(self) -> Any:
        """The optimizer of the servers, where trainers have their own."""
        return self.mode.outer if isinstance(self.mode, Local) else None


def check_same_training(
    folder: Path, told: dict[str, Any], driver: int, numbers: dict[str, Any]
) -> list[dict[str, Any]]:
    """Write down what is trained here, and with which hyperparameters; refuse a folder where it was another.

    Returns:
        the hyperparameters of every driver of this folder, this one last.

    Raises:
        ClusterError: a training of another graph, or of processes that share the work otherwise.
    """
    path = folder / "training.json"
    try:
        found = json.loads(path.read_text()) if path.exists() else told
        found = {"servers": told.get("servers")} | found  # older folders tell it by their graph alone
        before = found.get("hyperparameters", {})
        if all(found.get(name) == told[name] for name in told):
            by_driver = before | {str(driver): numbers}
            with appearing(path, path.with_name(f".part-{path.name}")) as part:
                part.write_text(json.dumps(told | {"hyperparameters": by_driver}))
            sync(folder)
            return list(by_driver.values())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ClusterError(f"The folder {folder} cannot be used for records: {error}") from error
    names = [name for name in told if found.get(name) != told[name]]
    was, now = ({name: side.get(name) for name in names} for side in (found, told))
    raise ClusterError(
        f"The folder {folder} holds the records of another training: {was}, and this one has {now}. Give "
        "another folder, or the same settings as before."
    )
