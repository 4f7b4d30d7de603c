"""python -m benchmarks.lenet: the fast loader beside a plain PyTorch script of the same model."""
