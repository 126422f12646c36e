"""Ways to spread one training over many devices, ranked before any device is there."""
