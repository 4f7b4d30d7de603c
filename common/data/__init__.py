"""From text to batches: sources, tokenizers, files, order, loader."""
