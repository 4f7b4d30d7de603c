"""python -m benchmarks.ops: our operators beside PyTorch's own."""
