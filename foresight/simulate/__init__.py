"""Simulate one rank of a world that is not there."""
