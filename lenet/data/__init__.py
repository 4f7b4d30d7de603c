"""Images: sources, file formats, augmentation, loader."""
