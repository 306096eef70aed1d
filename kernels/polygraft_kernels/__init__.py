"""Maths on tensors for Polygraft: one set of operations, several backends. Knows nothing of requests."""
