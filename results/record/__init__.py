"""What one run leaves: its folder, its steps, its row."""
