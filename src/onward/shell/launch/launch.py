"""``onward launch``: one script in several processes of this machine, as one JAX computation.

The script knows nothing of it: it runs in one process and in several. How one of them joins the others is in
``worker``; how they end together in ``gang``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from onward.core.errors import ArgumentError
from onward.shell.launch.gang import Ending, Gang, Signals, blamed, name_of
from onward.shell.launch.printer import Printer
from onward.shell.launch.relay import Relay
from onward.shell.launch.worker import VARIABLE, LaunchedProcess


@dataclass(frozen=True)
class LaunchPlan:
    """The options of a launch: the script, and how its processes run.

    Args:
        script: a Python file.
        arguments: what it finds in ``sys.argv[1:]``.
        processes: how many.
        devices: host devices of each process; None: as many as JAX shows by itself.
        restarts: how often all are started again when one fails.
        deadline: how many seconds a step may wait for other processes.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    processes: int = 1
    devices: int | None = None
    restarts: int = 0
    deadline: float = 300.0


def launch(plan: LaunchPlan) -> int:
    """Start the processes, print what they print, and wait; returns the exit status.

    Raises:
        OSError: there is no such script.
        ArgumentError: there are fewer GPUs than processes.
    """
    _check(plan.script)
    gpus = shares(_visible_gpus(os.environ), plan.processes)
    status = 0
    with Signals() as signals:
        for attempt in range(plan.restarts + 1):
            if attempt:
                _report(f"starting all again, restart {attempt} of {plan.restarts}")
            failed = _run(plan, gpus, signals)
            if signals.seen:
                _report(f"ended by {name_of(signals.seen[0])}")
                return 128 + signals.seen[0]
            if failed is None:
                return 0
            _report(str(failed))
            status = failed.status
    return status


def environment(
    base: Mapping[str, str], place: LaunchedProcess, devices: int | None = None, gpus: str | None = None
) -> dict[str, str]:
    """The environment of one process.

    Example:
        >>> place = LaunchedProcess(0, 2, "127.0.0.1:4000", "127.0.0.1:4001", 300.0, 5)
        >>> environment({"XLA_FLAGS": "--xla_dump_to=/tmp/dump"}, place, devices=4)["XLA_FLAGS"]
        '--xla_dump_to=/tmp/dump --xla_force_host_platform_device_count=4'
    """
    made = {**base, VARIABLE: place.to_text(), "ONWARD_DEADLINE": str(place.deadline)}
    if place.count > 1:
        made["PYTHONUNBUFFERED"] = "1"
        # JAX's handler of SIGTERM would let the process live on.
        made.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "0")
        if any(name.lower().endswith("_proxy") for name in base):
            # gRPC would ask the proxy for this very machine, and wait forever.
            spared = base.get("no_grpc_proxy") or base.get("no_proxy") or ""
            made["no_grpc_proxy"] = f"{spared},127.0.0.1".lstrip(",")
    if devices is not None:  # of a flag that comes twice the last one counts
        flag = f"--xla_force_host_platform_device_count={devices}"
        made["XLA_FLAGS"] = f"{base.get('XLA_FLAGS', '')} {flag}".strip()
    if gpus is not None:
        made["CUDA_VISIBLE_DEVICES"] = gpus
    return made


def shares(gpus: list[str], processes: int) -> list[str | None]:
    """The GPUs that each process sees, equally many each; None: those that this process sees.

    Raises:
        ArgumentError: there are fewer GPUs than processes.

    Example:
        >>> shares(["0", "1", "2", "3"], 2)
        ['0,1', '2,3']
    """
    if not gpus or processes == 1:
        return [None] * processes
    if len(gpus) < processes:
        raise ArgumentError(
            f"{processes} processes need a GPU each, and this machine shows {len(gpus)} ({', '.join(gpus)}). "
            f"Start {len(gpus)}, or train on the host: JAX_PLATFORMS=cpu onward launch -n {processes} ..."
        )
    each = len(gpus) // processes
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(processes)]


def _run(plan: LaunchPlan, gpus: list[str | None], signals: Signals) -> Ending | None:
    """Run all processes once; returns the failure that ended them, if any."""
    printer = Printer(plan.processes)
    lifeline, end = os.pipe()  # what reads it ends when this process does, however that comes

    def start(index: int) -> subprocess.Popen[bytes]:
        place = LaunchedProcess(index, plan.processes, relay.address, relay.target, plan.deadline, lifeline)
        process = subprocess.Popen(
            [sys.executable, "-m", "onward.shell.launch.worker", str(plan.script), *plan.arguments],
            env=environment(os.environ, place, plan.devices, gpus[index]),
            stdin=subprocess.DEVNULL,
            stdout=printer.pipe,
            stderr=printer.pipe,
            pass_fds=[lifeline],
            process_group=0,  # Ctrl-C in a terminal reaches this process only, which passes it on
        )
        printer.follow(index, process)
        return process

    try:
        with Relay() as relay:
            gang = Gang(start, plan.processes, signals)
            gang.run()
    finally:
        os.close(lifeline)
        os.close(end)
    printer.finish()
    return blamed(gang.failed)


def _check(script: Path) -> None:
    if script.is_dir():
        raise IsADirectoryError(f"{script} is a folder; expected a Python file: onward launch -n 2 train.py")
    if not script.is_file():
        raise FileNotFoundError(
            f"{script} does not exist; expected a Python file: onward launch -n 2 train.py"
        )


def _visible_gpus(variables: Mapping[str, str]) -> list[str]:
    """The GPUs that JAX would use here, as ``CUDA_VISIBLE_DEVICES`` names them."""
    platforms = variables.get("JAX_PLATFORMS", "cuda")
    can_use = any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))
    if not can_use or not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if (given := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name not in ("", "-1")]
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _report(text: str) -> None:
    print(f"onward: {text}", file=sys.stderr, flush=True)
