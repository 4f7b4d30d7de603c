"""How each library's training fits the engine that the loop drives."""
