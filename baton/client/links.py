"""Connections of a client, opened again once its certificates have changed.

Calls in flight keep their connection. Independent of the services called.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from baton.tls import Pem, PemFiles, Tls

_Channel = TypeVar("_Channel")
_Stub = TypeVar("_Stub")


class Links(Generic[_Channel]):
    """Channels of a client, one to each address."""

    def __init__(
        self,
        addresses: Collection[str],
        tls: Tls | None,
        open_channel: Callable[[str, Pem | None], _Channel],
        retire: Callable[[_Channel], None],
    ) -> None:
        """Takes `open_channel`, called with the contents of the files of `tls` (None without TLS),
        and `retire`, called with a channel that gets no new calls, to close it after its last one.

        Raises `FailedPreconditionError` for files that cannot be read.
        """
        self._addresses = addresses
        self._open = open_channel
        self._retire = retire
        self._files = None if tls is None else PemFiles(tls)
        self._shown = None if self._files is None else self._files.current()
        self._channels = self._opened()

    @property
    def all(self) -> Collection[_Channel]:
        """Channels on which new calls begin."""
        return self._channels.values()

    def __getitem__(self, address: str) -> _Channel:
        """Returns the channel for a call that begins now."""
        if self._files is not None:
            shown = self._files.current()
            if shown is not self._shown:
                self._shown = shown
                former, self._channels = self._channels, self._opened()
                for channel in former.values():
                    self._retire(channel)
        return self._channels[address]

    def _opened(self) -> dict[str, _Channel]:
        return {address: self._open(address, self._shown) for address in self._addresses}


class Stubs(Generic[_Channel, _Stub]):
    """Stubs of one service, in the order of its addresses."""

    def __init__(
        self,
        links: Links[_Channel],
        addresses: Sequence[str],
        make: Callable[[_Channel], _Stub],
    ) -> None:
        self._links = links
        self._addresses = addresses
        self._make = make
        self._made: dict[int, tuple[_Channel, _Stub]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, index: int) -> _Stub:
        channel = self._links[self._addresses[index]]
        made = self._made.get(index)
        if made is None or made[0] is not channel:
            made = self._made[index] = channel, self._make(channel)
        return made[1]
