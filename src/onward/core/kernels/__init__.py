"""The kernels that a compiler makes of equations: what it adds, what it does on the way, and their order."""
