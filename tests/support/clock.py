"""Clock that a test sets."""


class Clock:
    """Returns `now` when it is called."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
