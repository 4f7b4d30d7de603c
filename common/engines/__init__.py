"""The engines: how the training of each library fits the one loop."""
