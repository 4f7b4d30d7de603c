"""The bound beyond which a measurement says little. It stands alone, so that those who only read rows need no torch."""

# The share of a machine that others may take. A row of which more was taken is marked, and a bench refuses it.
TAKEN_MAX = 0.05
