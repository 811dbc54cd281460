"""Byte budget of the request bodies that an endpoint picker holds at once."""


class HeldBytes:
    """Byte budget shared by all exchanges.

    Attributes:
        num_bytes: bytes held now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, num_bytes: int) -> bool:
        """Adds bytes, and returns whether there was room for them."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Subtracts bytes that were taken before."""
        self.num_bytes -= num_bytes
