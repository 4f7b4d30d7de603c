"""Compare predicted step times with measured ones."""
