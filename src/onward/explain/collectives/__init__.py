"""The exchanges between devices in a compiled step, and why they are there."""
