"""The loss head, or attention, in chunks of rows: logits and scores never exist as a whole."""
