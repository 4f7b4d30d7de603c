"""The vision models, by name."""
