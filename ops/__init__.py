"""Operators written by hand; empty until they land."""
