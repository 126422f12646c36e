"""The loss head in chunks of rows, so that the logits never exist as a whole."""
