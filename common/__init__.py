"""What all recipes share: model, data, loss, schedule, FLOP counts, metrics, the engine contract, the loop, checkpoints."""
