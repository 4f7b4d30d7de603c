"""Runs as jobs of a cluster, whose one scheduler is Slurm: the script, its submission, its nodes and its end."""
