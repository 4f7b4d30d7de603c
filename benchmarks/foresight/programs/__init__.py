"""Programs that are simulated beside what others measured."""
