"""The commands of gptscale, a module each, but for the benchmarks."""
