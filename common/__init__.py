"""What all recipes share: settings, data, model, optimizers, engines, the training loop, checkpoints, measures."""
