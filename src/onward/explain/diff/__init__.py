"""What changed from one Program to another."""
