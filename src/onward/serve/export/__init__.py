"""A model or a training step as one file that needs no code: written by ``save``, read by ``load``."""
