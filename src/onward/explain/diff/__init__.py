"""The differences between two Programs."""
