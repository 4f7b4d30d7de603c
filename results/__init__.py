"""The results of runs: what each leaves, how runs are compared, and how tables and figures are made."""
