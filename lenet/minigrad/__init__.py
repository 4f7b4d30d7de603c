"""The experiment that trains the small autograd of ops/minigrad on digits."""
