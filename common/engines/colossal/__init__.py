"""Colossal-AI: its start, its model, its plugins as engines."""
