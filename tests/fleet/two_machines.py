"""Two machines of a Ray cluster on one: network namespaces that a cable joins, which is cut and mended.

A process that ``alone`` starts is on the first machine, "here", with namespaces of its own (network, host
name, files, processes): nothing that it starts outlives it, and nothing of it is reached from outside. There
``Machines`` adds the second one, "there", with its own ``/dev/shm`` and its own folder for Ray.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE, THERE = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{HERE}:6379"
CUTS = ("both ways", "answers", "frozen")
"""How a machine is cut off: no packet arrives, none of its own do, or all of its processes stand still."""

SOON = {"health_check_initial_delay_ms": 5000, "health_check_period_ms": 1000}
SOON |= {"health_check_timeout_ms": 4000, "health_check_failure_threshold": 3}
"""After how long Ray takes a machine for dead: some 15 s, and not up to a minute."""

QUIET = {"RAY_worker_niceness": "0", "RAY_kill_worker_timeout_milliseconds": "100"}
LIMITS = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
READY = "ip link set lo up && mount -t tmpfs tmpfs {ray} && mount -t tmpfs tmpfs /dev/shm && echo ready"


def alone():
    """The beginning of a command that should run here."""
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    own = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *user, *own]


def can_be_made():
    """Whether this system lets us have namespaces."""
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip", "hostname")))
    return tools and not subprocess.run([*alone(), "true"], capture_output=True, check=False).returncode


class Machines:
    """Both machines, with Ray on each; a context manager, for a process that ``alone`` started."""

    def __init__(self, folder):
        self.ray = Path(folder, "ray")  # Ray's sockets have short names
        self.ray.mkdir()
        self.started = []

    def __enter__(self):
        (self.ray.parent / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} here\n{THERE} there\n")
        (self.ray.parent / "resolv.conf").write_text("")
        for name in ("hosts", "resolv.conf"):
            command("mount", "--bind", self.ray.parent / name, f"/etc/{name}")
        command("hostname", "here")
        command("ip", "link", "set", "lo", "up")
        script = f"hostname there && {READY.format(ray=self.ray)} && exec sleep infinity"
        own = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script]
        self.other = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)
        assert self.other.stdout.readline() == "ready\n"
        cable = ["type", "veth", "peer", "name", "cable", "netns", str(self.other.pid)]
        command("ip", "link", "add", "cable", *cable)
        for on, address in (((), HERE), (self.there("--net"), THERE)):
            command(*on, "ip", "address", "add", f"{address}/24", "dev", "cable")
            command(*on, "ip", "link", "set", "cable", "up")
            command(*on, "ip", "route", "add", "default", "dev", "cable")  # from which Ray takes the address
        self.start("--head", f"--node-ip-address={HERE}", "--port=6379", f"--temp-dir={self.ray}")
        return self

    def __exit__(self, *raised):
        for process in (*self.started, self.other):
            process.kill()
            process.wait()

    def there(self, *kinds):
        """The beginning of a command that should run on the other machine."""
        return ["nsenter", f"--target={self.other.pid}", *kinds]

    def start(self, *how, on=()):
        head = ["--include-dashboard=false", f"--system-config={json.dumps(SOON)}"] if not on else []
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *how, *head, *LIMITS]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.started.append(subprocess.Popen([*on, *ray], env={**os.environ, **QUIET}, **quiet))

    def join(self):
        """Have the other machine be one of the cluster, whatever it was before."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        on = self.there("--net", "--uts", "--mount", f"--wd={os.getcwd()}")
        self.start(f"--address={ADDRESS}", f"--node-ip-address={THERE}", on=on)

    def rejoin(self):
        """Join again if Ray there has ended: on a busy machine it may answer too late, and ends itself."""
        if self.started[-1].poll() is not None:
            self.join()

    def processes(self):
        """The processes of the other machine."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_there(pid)]

    def _is_there(self, pid):
        try:
            own = os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{self.other.pid}/ns/net")
        except OSError:
            return False
        return own and pid != self.other.pid

    def cut(self, how):
        """Cut the other machine off, in one of the ways of ``CUTS``."""
        if how == "frozen":
            self.signal(signal.SIGSTOP)
            return
        command(*self.there("--net"), "ip", "route", "add", "blackhole", HERE)
        if how == "both ways":
            command("ip", "route", "add", "blackhole", THERE)

    def mend(self, how):
        """Join the machines again."""
        if how == "frozen":
            self.wake()
            return
        command(*self.there("--net"), "ip", "route", "del", "blackhole", HERE)
        if how == "both ways":
            command("ip", "route", "del", "blackhole", THERE)

    def wake(self):
        """Let all processes of the other machine go on that stand still."""
        self.signal(signal.SIGCONT)

    def signal(self, number):
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def said(self):
        """The lines that processes of the other machine wrote to stderr, while it is there."""
        logs = Path(f"/proc/{self.other.pid}/root{self.ray}").glob("session_2*/logs/worker-*.err")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]


def command(*words):
    subprocess.run(list(map(str, words)), check=True)


def until(condition, seconds, what):
    """Wait for something, for so long."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{seconds:g} s went by: {what}"
        time.sleep(0.05)
    return found
