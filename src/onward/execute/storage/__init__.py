"""How state lies in memory between two steps: few buffers in place of many small arrays."""
