"""Find out what limits the speed of a run."""
