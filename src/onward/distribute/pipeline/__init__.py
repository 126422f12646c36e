"""One Program cut into stages, which work on several micro-batches at once: ``pipeline``."""
