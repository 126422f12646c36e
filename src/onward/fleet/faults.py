"""The edges of the protocol, where a test may break it; nothing happens here otherwise."""

from __future__ import annotations

from onward.fleet.link import Link

EDGES = (
    "before send",
    "after send",
    "before apply",
    "after apply",
    "during write",
    "after write",
    "before reply",
)
"""Where a process can die: a trainer at the first two, a server at the others."""
MEANWHILE = "meanwhile"
"""Where a server can die too: in the thread that writes a whole record beside the work."""

BETWEEN = "between parts and whole"
"""And where rules look across servers: one has computed what it adds to a sum, and nobody knows it yet."""


class Faults:
    """The faults at the edges of the protocol: none here; tests override the methods."""

    def reach(self, who: str, edge: str) -> None:
        """Called by ``who`` ("server 0", "trainer 1") at an edge."""

    def link(self, who: str, link: Link) -> Link:
        """The link that a trainer should use in place of this one."""
        return link
