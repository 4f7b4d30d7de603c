"""One GPT run: options, checks, start, worker, its row."""
