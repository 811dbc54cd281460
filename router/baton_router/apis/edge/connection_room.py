"""Room for new HTTP connections: at the limit one that waits for its client gives way, of the
address with the most connections."""

from typing import Protocol

from baton.fairness.fair_bound import FairBound


class Held(Protocol):
    """Connection that takes room.

    Attributes:
        holder: the address of its client.
        last_active_at: time since which it waits, if it does, in seconds of one clock.
    """

    holder: str
    last_active_at: float

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its client, which may let it wait for long."""

    def evict(self) -> None:
        """Closes it at once."""


class ConnectionRoom:
    """Room of one server, for `max_connections`."""

    def __init__(self, max_connections: int) -> None:
        self._bound = FairBound(max_connections)
        self._connections: set[Held] = set()

    def enter(self, connection: Held) -> bool:
        """Takes a connection in, at the limit in the place of another one. Returns False if there
        is none that waits, of an address that has as many."""
        if self._bound.victim_for(connection.holder) is not None:
            displaced = self._longest_waiting(self._bound.held_by(connection.holder))
            if displaced is None:
                return False
            self.leave(displaced)
            displaced.evict()
        self._connections.add(connection)
        self._bound.add(connection.holder)
        return True

    def leave(self, connection: Held) -> None:
        """Gives the room of a connection back. Idempotent."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._bound.remove(connection.holder)

    def _longest_waiting(self, least_held: int) -> Held | None:
        """Returns the connection that waits for longest, of the address with the most that has any
        that waits, and `least_held` in all; None if there is none."""
        held_by = self._bound.held_by
        waiting = (each for each in self._connections if each.is_waiting)
        return max(
            (each for each in waiting if held_by(each.holder) >= least_held),
            key=lambda each: (held_by(each.holder), -each.last_active_at),
            default=None,
        )
