"""From a training Program to a better one: the same training in less memory and time, watched and guarded."""
