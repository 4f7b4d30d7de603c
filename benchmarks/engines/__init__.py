"""python -m benchmarks.engines: what our layer adds to each engine's own minimal loop."""
