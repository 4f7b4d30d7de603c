"""The GPT, its parts, and how its matrix products are computed."""
