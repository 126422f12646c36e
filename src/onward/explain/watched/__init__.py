"""What ``watch`` saw over a training: as a picture, as TensorBoard files."""
