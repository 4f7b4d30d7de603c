"""Optimizers and the state they keep."""
