"""python -m benchmarks.memory: the largest batch that fits, by each way to make it fit."""
