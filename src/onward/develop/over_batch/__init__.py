"""Infer the whole batch from a part of it: how every value of a traced function follows the batch."""
