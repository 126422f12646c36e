"""One Program becomes one for each participant: replicate, and the ways to merge gradients."""
