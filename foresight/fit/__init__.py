"""A model of one's own: its splits as programs, tried and proved."""
