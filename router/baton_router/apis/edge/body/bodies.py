"""Request bodies: read up to a size limit and parsed into their schema.

An error names the path of the first invalid field, as in `messages[0].role`.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request

from baton.errors import InvalidArgumentError, OverloadedError
from baton.serving.bounds import Bounds
from baton.serving.grpc.large_requests import LARGE_BYTES, LargeRequests, Share
from baton_router.apis.edge.body.left_out import LeftOut
from baton_router.apis.edge.body.objects import objects_of, without_nulls
from baton_router.apis.edge.body.other_servers import in_own_terms
from baton_router.apis.edge.body.other_tools import served_tools
from baton_router.apis.edge.body.structure import PIECE_BYTES, Structure
from baton_router.apis.edge.body.unknown_fields import Unknown, UnknownFields, find_unknown
from baton_router.apis.edge.errors import (
    BodyOverloadError,
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
)

# Timeout for a body to arrive, in seconds, whatever its size.
BODY_SECONDS = 60.0
# What arrives is scanned for about as long before other requests go on, in seconds.
_TURN_SECONDS = 0.001
_SHOWN_CHARS = 40
# In larger bodies, a key that is there twice is not looked for to be named.
_NAMED_KEY_BYTES = 2**20

# Fields of a body whose numbers may be written as floats.
_MAX_FLOATS = 64
# Floats from which on not every integer is one.
_EXACT_FLOATS = 2.0**53
_NAMED = re.compile(r"(missing required|unknown) field `(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

# What a message can hold; the vocabulary is checked with every request's.
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

_Schema = TypeVar("_Schema", bound=msgspec.Struct)


class Bodies:
    """Reader of request bodies, whose counts and bytes are bounded.

    Args:
        max_bytes: maximum bytes of one body.
        bounds: bounds of its structure; its kind is the name of its schema.
        large: budget and threads of large bodies.
        unknown: policy for unknown fields; None: they are ignored.
    """

    def __init__(
        self,
        max_bytes: int,
        bounds: Bounds,
        large: LargeRequests,
        unknown: UnknownFields | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._bounds = bounds
        self._large = large
        self._unknown = unknown or UnknownFields()

    @asynccontextmanager
    async def read(
        self,
        request: Request,
        schema: type[_Schema],
        count_bytes: Callable[[int], None],
        tenant: str,
    ) -> AsyncIterator[_Schema]:
        """Reads and parses the body. A large one has its share of the budget, as the tenant's,
        within the block. Calls `count_bytes` with its size before it is parsed.

        Raises the errors of `read_body` and `parse`, and for unknown fields that are refused.
        """
        with self._large.share(tenant) as share:
            structure = Structure(self._bounds.of_kind.get(schema.__name__, self._bounds))
            body = await read_body(
                request.stream(), request.headers, self._max_bytes, structure, share
            )
            count_bytes(len(body))
            unknown: list[Unknown] = []
            if len(body) <= LARGE_BYTES:
                parsed = parse(body, schema, structure.num_keys, unknown)
            else:
                parsed = await self._large.parse(
                    tenant, parse, body, schema, structure.num_keys, unknown
                )
            del body
            self._unknown.note(request.scope, unknown)
            yield parsed


async def read_body(
    chunks: AsyncIterator[bytes],
    headers: Mapping[str, str],
    max_bytes: int,
    structure: Structure,
    share: Share,
) -> bytearray:
    """Returns the whole body, whose bytes `share` then holds. Keeps at most `max_bytes`, and reads
    nothing if more is announced. `structure` counts what arrives.

    Raises `MediaTypeError`, `BodyTooLargeError`, `BodyTimeoutError`, `BoundsError`,
    `StructureError`, `OverloadedError`.
    """
    _check_media_type(headers)
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    body = bytearray()
    turn_end = 0.0
    try:
        async with share.receiving(BODY_SECONDS):
            async for chunk in chunks:
                if len(body) + len(chunk) > max_bytes:
                    raise BodyTooLargeError(max_bytes)
                await share.grow(len(body) + len(chunk))
                body += chunk
                for begin in range(0, len(chunk), PIECE_BYTES):
                    structure.feed(chunk[begin : begin + PIECE_BYTES])
                    if time.monotonic() > turn_end:
                        await asyncio.sleep(0)
                        turn_end = time.monotonic() + _TURN_SECONDS
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not come within {BODY_SECONDS:g} s") from None
    except OverloadedError as error:
        raise BodyOverloadError(str(error), error.retry_after, reason=error.reason) from None
    return body


def _check_media_type(headers: Mapping[str, str]) -> None:
    # Otherwise any page in a browser could send requests here without a CORS preflight.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError("the content type of a request must be application/json")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(
            f"the content encoding of the body is {encoding[:_SHOWN_CHARS]!r}; expected none. "
            "Send it uncompressed."
        )


def parse(
    body: bytes | bytearray, schema: type[_Schema], num_keys: int, unknown: list[Unknown]
) -> _Schema:
    """Returns the validated body, which has `num_keys` keys in all, and adds its unknown fields to
    `unknown`. Raises `InvalidArgumentError`, which names the field."""
    content = _read_json(body)
    if not isinstance(content, dict):
        raise InvalidArgumentError("body", "must be a JSON object")
    request = request_of(content, schema, unknown)
    if _count_keys(content) < num_keys:
        raise _double_key(body)
    return request


def request_of(
    content: Mapping[str, Any], schema: type[_Schema], unknown: list[Unknown]
) -> _Schema:
    """Returns the fields of a body validated, and adds those that are unknown to `unknown`. Raises
    `InvalidArgumentError`, which names the field."""
    given = {name: value for name, value in content.items() if value is not None}
    kept = in_own_terms(given, _names_of(schema))
    types = getattr(schema, "tool_types", None)
    if types is not None and isinstance(kept.get("tools"), list):
        kept["tools"] = served_tools(kept["tools"], types, unknown)
    left_out: LeftOut | None = getattr(schema, "left_out", None)
    if left_out is not None:
        kept = left_out.applied(kept, unknown)
    request: _Schema = convert(kept, schema)
    unknown += find_unknown(kept, schema)
    return request


@lru_cache(maxsize=64)
def _names_of(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_encode_fields__)


def convert(content: Any, kind: Any, field: str = "") -> Any:
    """Returns JSON objects as values of the type `kind`; fields that are null are absent, and 3.0
    is an integer, as in JSON Schema. Raises `InvalidArgumentError`, which names the field;
    `content` is the value of `field` or the whole body."""
    content = without_nulls(content, objects_of(kind))
    for _ in range(_MAX_FLOATS):
        try:
            return msgspec.convert(content, kind)
        except msgspec.ValidationError as error:
            if not _mends_float(error, content):
                raise _explained(error, content, field) from None
    raise InvalidArgumentError(field or "body", "has too many numbers such as 3.0; write 3")


def _mends_float(error: msgspec.ValidationError, content: Any) -> bool:
    """Writes an integer in the place of a float such as 3.0 that is the reason of this error, and
    of those beside it if it is one of a list. Returns whether there is one."""
    problem, _, where = str(error).partition(" - at `")
    steps = [int(index) if index else name for name, index in _STEP.findall(where.rstrip("`"))]
    if not problem.endswith("got `float`") or not steps or "[...]" in where:
        return False
    holders = [content]
    for step in steps:
        holders.append(holders[-1][step])
    if not _is_integer(holders.pop()):
        return False
    # The outermost list that has nothing but lists on the way.
    while len(holders) > 1 and isinstance(holders[-1], list) and isinstance(holders[-2], list):
        holders.pop()
        steps.pop()
    holder, step = holders[-1], steps[-1]
    if isinstance(holder, list):
        holder[:] = map(_with_integers, holder)
    else:
        holder[step] = int(holder[step])
    return True


def _with_integers(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_with_integers, value))
    return int(value) if _is_integer(value) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS


def _read_json(body: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise InvalidArgumentError("body", "is not valid UTF-8; text must be") from None
    except msgspec.DecodeError as error:
        if len(body) <= LARGE_BYTES and rb"\ud" in body.lower():
            _find_half_surrogate(body)
        raise InvalidArgumentError("body", f"is not JSON: {error}") from None


def _count_keys(content: Any) -> int:
    """Returns the number of different keys of each object, in all."""
    num_keys = 0
    if isinstance(content, dict):
        num_keys = len(content)
        content = content.values()
    for value in content:
        if type(value) is dict or type(value) is list:
            num_keys += _count_keys(value)
    return num_keys


def _double_key(body: bytes | bytearray) -> InvalidArgumentError:
    """Returns the error of a body in which an object has a key twice: a proxy that checks requests
    may have read the other one."""
    doubles: list[str] = []

    def find(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            doubles.append(Counter(key for key, _ in pairs).most_common(1)[0][0])

    if len(body) <= _NAMED_KEY_BYTES:
        json.loads(body, object_pairs_hook=find)
    name = f"the key {doubles[0][:_SHOWN_CHARS]!r}" if doubles else "a key"
    return InvalidArgumentError("body", f"has {name} twice; expected it once")


def _find_half_surrogate(body: bytes | bytearray) -> None:
    """Raises an error that names the text with half of a surrogate pair, if that is what is wrong:
    JSON can encode it, but no text can hold it."""
    with suppress(ValueError):
        _check_text(json.loads(body), ())


def texts_or_ids(given: str | list[Any], field: str) -> str | list[Any]:
    """Returns a text, or texts, token ids or lists of them. Raises `InvalidArgumentError` unless
    all items are of the first one's type."""
    if not isinstance(given, list) or not given:
        return given
    kinds: dict[type, Any] = {str: list[str], list: list[list[_TokenId]]}
    found: list[Any] = convert(given, kinds.get(type(given[0]), list[_TokenId]), field)
    return found


def _explained(
    error: msgspec.ValidationError, content: Any, field: str = ""
) -> InvalidArgumentError:
    """Returns the error with the path of what is wrong in `content`, which is the value of `field`
    or the whole body."""
    problem, _, where = str(error).partition(" - at `")
    path, value = _path(where.rstrip("`"), content)
    path = f"{field}.{path}" if field and path and not path.startswith("[") else field + path
    named = _NAMED.search(problem)
    if named is None:
        return InvalidArgumentError(path or "body", _problem(problem, value))
    path = f"{path}.{named[2]}" if path else named[2] or "body"
    is_missing = named[1] == "missing required"
    return InvalidArgumentError(
        path, "is missing" if is_missing else "is not supported here; leave it out"
    )


def _path(where: str, content: Any) -> tuple[str, Any]:
    """Returns the path that an error tells as `$.messages[0]`, and the value there. The key of a
    dictionary is not told, so that its path ends before."""
    path, value = "", content
    for name, index in _STEP.findall(where):
        path += f"[{index}]" if index else f".{name}" if path else name
        value = value[int(index)] if index else value.get(name)
    return path, (None if where.endswith("[...]") else value)


def _problem(problem: str, given: Any) -> str:
    is_short = isinstance(given, str | int | float) and len(str(given)) <= _SHOWN_CHARS
    if not problem.startswith("Expected "):  # a value that is none of several
        return f"is {given!r}, which is not supported here" if is_short else "is not supported here"
    bound = problem.replace("`", "").replace("Expected", "must be", 1)
    return f"is {given!r}; {bound}" if is_short else bound


def _check_text(value: Any, location: tuple[int | str, ...]) -> None:
    """Raises for half of a surrogate pair, which JSON can encode but no text can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
            raise InvalidArgumentError(
                path.removeprefix(".") or "body", "holds half of a surrogate pair"
            ) from None
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, (*location, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, location)
            _check_text(item, (*location, key))
