"""What is decided before a tensor exists: options, batch sizes, learning rates, and their checks."""
