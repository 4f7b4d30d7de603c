"""DeepSpeed: its options, operators, optimizer and files."""
