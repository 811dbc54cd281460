"""Large gRPC messages: bounded and parsed in a thread, within the budget of large requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidArgumentError
from baton.serving.bounds import Bounds
from baton.serving.grpc.large_requests import LARGE_BYTES, LargeRequests
from baton.serving.grpc.malformed import Deserializer, Malformed, descriptor_of, tolerant
from baton.serving.grpc.message_bounds import check_message


@dataclass(slots=True)
class Unparsed:
    """Placeholder for a large request, which `read` parses.

    Attributes:
        data: the bytes; empty once they are parsed. An error in a later frame would keep them.
    """

    data: bytes
    read: Callable[[bytes], Any]


class LargeMessages:
    """Parser of the messages of a server above `large_bytes`, which gRPC would parse in the event
    loop."""

    def __init__(
        self,
        requests: LargeRequests,
        bounds: Bounds,
        large_bytes: int = LARGE_BYTES,
        holder_of: Callable[[Any], str] = lambda _: "",
    ) -> None:
        """Takes `holder_of`, which returns the tenant of a call's context, or raises."""
        self._requests = requests
        self._bounds = bounds
        self._large_bytes = large_bytes
        self._holder_of = holder_of

    def deferring(self, deserialize: Deserializer) -> Deserializer:
        """Wraps `deserialize` as `tolerant` does; a large message becomes an `Unparsed`."""
        descriptor, parse = descriptor_of(deserialize), tolerant(deserialize)
        if descriptor is None:
            return parse

        def read(data: bytes) -> Any:
            try:
                check_message(data, descriptor, self._bounds)
            except InvalidArgumentError as error:
                return Malformed(error.with_traceback(None))  # which would keep the bytes
            return parse(data)

        most = self._large_bytes
        return lambda data: parse(data) if len(data) <= most else Unparsed(data, read)

    async def parse(self, message: Unparsed, context: Any) -> Any:
        """Returns the request, or a `Malformed` if it is none or beyond a bound. Raises
        `OverloadedError` if other large requests leave no room."""
        holder = self._holder_of(context)
        with self._requests.share(holder) as share:
            try:
                await share.grow(len(message.data))
                return await self._requests.parse(holder, message.read, message.data)
            finally:
                message.data = b""
