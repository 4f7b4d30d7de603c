"""The record of runs: the CSV schema and its writers, comparison, plots, report."""
