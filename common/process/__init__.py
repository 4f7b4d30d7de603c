"""How a process of a run starts, meets its peers, is stopped, and ends."""
