"""Bytes that a run will need: a bound from the options, live tensors, and the allocator of a simulated device."""
