"""A trained Program answers: saved in a file, loaded without its code, served over HTTP."""
