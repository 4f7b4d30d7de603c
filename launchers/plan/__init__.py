"""What `gptscale plan` is asked, and what it prints and writes."""
