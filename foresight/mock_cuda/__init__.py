"""A stand-in for CUDA: it gives out addresses, counts what is asked of it, and computes nothing."""
