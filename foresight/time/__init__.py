"""Seconds that a step will take: costs of operations and links, and an event simulation of streams and ranks."""
