"""Why compiling takes as long as it does."""
