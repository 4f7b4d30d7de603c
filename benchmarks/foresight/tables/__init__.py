"""Runs measured by others: readers of their tables, and how far our predictions are from them."""
