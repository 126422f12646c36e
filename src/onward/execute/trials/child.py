"""One set of options in a process of its own: ``python -m onward.execute.trials.child folder``.

The folder holds a job, which says where a step lies as ``jax.export`` writes it, and its arrays. The process
compiles the step, runs it once, writes what came out and answers one line of JSON. Then each line that it
reads is a number of steps, which it runs from the same arrays; it answers the seconds that one took. Its
input closes when the process that started it ends, and so it ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh

from onward.core.variable import holds_keys
from onward.execute.disk.encoding import ArrayForm, decode, encode
from onward.execute.host_memory import keep_for_steps, temporary_bytes

ARRAYS, RESULTS, JOB = "arrays.npz", "results.npz", "job.json"


class Running:
    """A step that was read from a folder, compiled, on arrays that stay as they are."""

    def __init__(self, job: dict[str, Any]) -> None:
        folder = Path(job["folder"])
        step = export.deserialize(bytearray((folder / job["step"]).read_bytes()))
        forms = [[ArrayForm(d, tuple(s), g) for d, s, g in group] for group in job["forms"]]
        with np.load(folder / ARRAYS) as stored:
            groups = [
                [decode(form, stored[f"{i}_{j}"]) for j, form in enumerate(group)]
                for i, group in enumerate(forms)
            ]
        self.given, self.shardings = groups, None
        shardings = {}
        if step.nr_devices > 1:
            mesh = Mesh(np.array(jax.devices()[: step.nr_devices]), ("replicas",))
            flat = step.in_shardings_jax(mesh)
            self.shardings = jax.tree.unflatten(jax.tree.structure(tuple(map(tuple, groups))), flat)
            shardings = {"in_shardings": self.shardings}
        types = jax.tree.unflatten(step.in_tree, step.in_avals)[0]
        jitted = jax.jit(step.call, donate_argnums=(0,), **shardings)
        self.compiled = jitted.lower(*types).compile(job["options"])
        self.temporary = temporary_bytes(self.compiled)
        keep_for_steps(self.compiled, job["keep_memory"], job["options"])

    def arguments(self, scale: float = 0.0, seed: int = 0) -> list[Any]:
        """Copies of the arrays; their floats changed at random by about so much of each."""
        draws = np.random.default_rng(seed)
        groups = tuple(tuple(_changed(x, scale, draws) for x in group) for group in self.given)
        return list(jax.block_until_ready(jax.device_put(groups, self.shardings)))

    def once(self, scale: float = 0.0, seed: int = 0) -> list[Any]:
        """All that one step returns."""
        return jax.tree.leaves(jax.block_until_ready(self.compiled(*self.arguments(scale, seed))))

    def seconds(self, steps: int) -> float:
        """How long one of so many steps takes, each waited for."""
        reused, lent, data = self.arguments()
        begin = perf_counter()
        for _ in range(steps):
            (reused, others), results = self.compiled(tuple(reused), tuple(lent), tuple(data))
            jax.block_until_ready(results if results else (reused, others))
        return (perf_counter() - begin) / steps


def _changed(x: Any, scale: float, draws: np.random.Generator) -> Any:
    if holds_keys(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact) or not scale:
        return jnp.copy(x)
    factor = 1 + scale * draws.choice([-1.0, 1.0], x.shape)
    return jnp.asarray((np.asarray(x) * factor).astype(x.dtype))


def _written(file: Path, results: Sequence[Any]) -> list[Any]:
    encoded = [encode(str(i), x) for i, x in enumerate(results)]
    arrays: dict[str, Any] = {str(i): stored for i, (_, stored) in enumerate(encoded)}
    np.savez(file, **arrays)
    return [[form.dtype, form.shape, form.generator] for form, _ in encoded]


def main(folder: Path) -> None:
    """Be the process: what libraries print goes where errors go."""
    job = json.loads((folder / JOB).read_text())
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for name, value in job["config"].items():
            jax.config.update(name, value)
        running = Running(job)
        forms = _written(folder / RESULTS, running.once())
        shown = {"forms": forms, "temporary": running.temporary}
        for seed in range(job["roundings"]):
            _written(folder / f"{seed}-{RESULTS}", running.once(job["rounding"], seed))
        print(json.dumps(shown), file=answers, flush=True)
        while True:
            print(json.dumps(running.seconds(int(lines.get()))), file=answers, flush=True)


def _read(lines: SimpleQueue[str]) -> None:
    """Pass on what is asked; end the process when nothing more can come, whatever it does."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
