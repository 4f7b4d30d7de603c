"""python -m benchmarks.model: our step beside others' and beside the machine's ceilings."""
