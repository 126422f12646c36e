"""Where two Programs part: the first op that makes of the same numbers others."""
