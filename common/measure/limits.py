"""How much others may take of a machine that measures. Whoever only reads rows imports this without torch."""

# The share of a machine that others may take. A row of which more was taken is marked, and a bench refuses it.
TAKEN_MAX = 0.05
