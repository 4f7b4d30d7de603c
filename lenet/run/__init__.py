"""One vision run: options, checks, training, its row and files."""
