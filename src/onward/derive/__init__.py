"""Forward, then backward, then update: the transforms that derive a training Program."""
