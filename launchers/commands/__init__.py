"""The commands of gptscale beside run and bench, a module each."""
