"""What this machine can do: operations timed alone, the file that keeps them, and the costs that follow from it."""
