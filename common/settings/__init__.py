"""What is decided before a tensor exists: options and their checks, batch sizes, learning rates.

Nothing here imports torch, so that a wrong option is refused at once.
"""
