"""Equal formulations of single ops that are faster on the device at hand, and where to put them."""
