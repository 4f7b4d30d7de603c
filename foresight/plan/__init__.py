"""Find the splits that are possible, predict their memory and time, and rank them."""
