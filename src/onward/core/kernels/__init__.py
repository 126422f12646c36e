"""The kernels that a compiler makes of equations: what it adds, what it does within others, and their order."""
