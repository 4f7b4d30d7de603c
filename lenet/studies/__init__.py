"""The vision experiments: each varies one thing and draws its page."""
