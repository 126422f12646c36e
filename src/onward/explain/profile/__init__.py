"""Where the time of a compiled step goes."""
