"""Repeated layers of a forward pass, found by comparing ops, as one loop over stacked parameters."""
