"""Measurements against alternatives in the same run."""
