"""Streams of server-sent events, as clients read them."""

import json
from collections.abc import Iterator
from typing import Any


def data_of(stream: bytes) -> Iterator[bytes]:
    """Yields the data of the events of a stream, but for its last words."""
    for line in stream.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield line.removeprefix(b"data: ")


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Returns the objects of the events of a stream."""
    return list(map(json.loads, data_of(stream)))
