"""How a run starts: the gptscale command, the worker, local processes, sweeps, parity, benchmarks."""
