"""Recorded requests of coding agents, without the words of their makers and users.

A recording keeps what a server reads by: fields, types, roles, names, schemas. Texts are replaced
by one word, ids by their number.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import h11

from tests.support.proxy import Link, Pipe, Proxy

_HERE = Path(__file__).parent / "requests"
_TEXT = "Text."
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID = re.compile(
    rf"(?<![a-z_])(?:call|chatcmpl|fco?|msg|resp|toolu)_[\w-]+|{_UUID}|[0-9a-f]{{32,}}"
)
_LONGEST = 48  # characters of a text that is kept: names, commands, results of the task
# Words of an agent's makers, however short.
_WORDS = {"description", "title", "user_id", "client_metadata", "prompt_cache_key"}


class Recorder:
    """Proxy before a server that notes what clients send. Use: `async with`."""

    def __init__(self, port: int) -> None:
        self._streams: list[bytearray] = []
        self._proxy = Proxy(port, self._link)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._proxy.port}"

    def requests(self) -> Iterator[tuple[str, Any]]:
        """Yields path and JSON of each request so far that has a body, by connections."""
        for stream in self._streams:
            yield from _requests(bytes(stream))

    async def __aenter__(self) -> Self:
        await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._proxy.__aexit__(*error)

    async def _link(self, _port: int) -> Link:
        stream = bytearray()
        self._streams.append(stream)

        def note(data: bytes) -> list[bytes]:
            stream.extend(data)
            return [data]

        return Link(there=Pipe(damage=note))


RECORDINGS = tuple(sorted(_HERE.glob("*.json")))
"""Files of recorded requests, each with its `path` and `body`."""


def recording_of(program: str) -> Path:
    """Returns the file with the recorded request of an agent."""
    return _HERE / f"{program}.json"


def last_turn(requests: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the request with the most turns, as a recording."""
    path, body = max(requests, key=lambda request: len(_turns(request[1])))
    return {"path": path.partition("?")[0], "body": _Plain().of(body)}


def _turns(body: Any) -> list[Any]:
    turns: list[Any] = body.get("messages") or body.get("input") or []
    return turns


class _Plain:
    """Replaces texts and ids."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def of(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            # In order, as the numbers of ids are by their first place.
            return {name: self.of(value[name], name) for name in sorted(value)}
        if isinstance(value, list):
            return [self.of(inner, key) for inner in value]
        if not isinstance(value, str):
            return value
        if key == "arguments" and value.startswith("{"):
            value = json.dumps(json.loads(value))  # the model's spaces are its choice
        if _ID.fullmatch(value):
            return self._numbered(value)
        if key in _WORDS or len(value) > _LONGEST or "\n" in value.strip():
            return _TEXT
        return _ID.sub(lambda found: self._numbered(found[0]), value)

    def _numbered(self, name: str) -> str:
        kind = re.match(r"[a-z]+_", name)
        number = len(self._ids) + 1
        return self._ids.setdefault(name, f"{kind[0] if kind else ''}{number}")


def _requests(stream: bytes) -> Iterator[tuple[str, Any]]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(stream)
    target, body = "", bytearray()
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            target, body = event.target.decode(), bytearray()
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            if body:
                yield target, json.loads(body)
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        else:
            return
