"""Models of other libraries, a file for each; only what is installed is imported."""
