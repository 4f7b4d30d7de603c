"""The way from text to batches: sources, tokenizers, files of ids, the order of sequences, the loader."""
