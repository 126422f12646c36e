"""A Program becomes an executable and runs: compile, Step, State."""
