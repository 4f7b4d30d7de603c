"""A clock for recorders and for the progress of a rank: time passes when a test says so."""


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
