"""Checkpoints: read them and write them."""
