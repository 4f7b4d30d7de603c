"""Cause slow runs on purpose, and check their verdicts."""
