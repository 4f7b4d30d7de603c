"""Measure what this machine can do, for predictions of step times."""
