"""gptscale bench parts: every way to compute each part of a step."""
