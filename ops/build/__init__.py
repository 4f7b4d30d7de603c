"""Compile the C++ operators, keep them, and load them."""
