"""Bytes that a run will need: closed forms, live tensors, and the allocator of a simulated device."""
