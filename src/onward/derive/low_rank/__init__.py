"""Low-rank adaptation: which products read a weight, and the factors beside them."""
