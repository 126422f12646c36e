"""The statistics that ``watch`` recorded over a training: as a picture, as TensorBoard files."""
