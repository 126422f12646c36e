"""One memory budget for a step: what to compute in chunks or again, and what to keep in host memory."""
