"""Break runs on purpose, again and again, and prove that nothing is lost."""
