"""A Program on its way into a file: what is said of it, and the arrays that it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.core.program import Program
from onward.execute.disk.encoding import encode
from onward.serve.export.container import OURS
from onward.serve.export.executable import Written
from onward.serve.export.graph import described

GRAPH, EXECUTABLE, CONSTANT = f"{OURS}graph:", f"{OURS}executable:", f"{OURS}constant:"


@dataclass(frozen=True, eq=False)
class Writing:
    """A Program on its way into the file, some of its lengths free.

    Attributes:
        program: the Program, symbols among its lengths.
        sizes: what the symbols stood for when it was traced.
        executable: what computes it.
    """

    program: Program
    sizes: Mapping[str, int]
    executable: Written

    @property
    def said(self) -> dict[str, Any]:
        """The entry of this Program in the header."""
        written = self.executable
        return {
            "sizes": dict(self.sizes),
            "platforms": list(written.platforms),
            "convention": written.convention,
            "constants": {v.name: vars(encode(v.name, x)[0]) for v, x in self.program.constants.items()},
        }

    def arrays(self, i: int, example: Program) -> dict[str, np.ndarray]:
        """Its graph, its executable and its constants as arrays."""
        graph = json.dumps(described(self.program, example), allow_nan=False).encode()
        constants = self.program.constants.items()
        return {
            f"{GRAPH}{i}": np.frombuffer(graph, np.uint8),
            f"{EXECUTABLE}{i}": np.frombuffer(self.executable.data, np.uint8),
            **{f"{CONSTANT}{i}:{v.name}": encode(v.name, x)[1] for v, x in constants},
        }
