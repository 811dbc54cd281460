"""Request bodies: read up to a size limit and parsed into their schema.

An error names the path of the first invalid field, as in `messages[0].role`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.errors import InvalidArgumentError
from baton_router.http.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

# Timeout for a body to arrive, in seconds, whatever its size.
BODY_SECONDS = 60.0
_SHOWN_CHARS = 40

_Schema = TypeVar("_Schema", bound=BaseModel)


async def read_body(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], max_bytes: int
) -> bytes:
    """Returns the whole body. Keeps at most `max_bytes`, and reads nothing if more is announced.

    Raises `MediaTypeError`, `BodyTooLargeError`, `BodyTimeoutError`.
    """
    # Otherwise any page in a browser could send requests here without a CORS preflight.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError("the content type of a request must be application/json")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in chunks:
                if len(body) + len(chunk) > max_bytes:
                    raise BodyTooLargeError(max_bytes)
                body += chunk
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(body)


def parse(body: bytes, schema: type[_Schema]) -> _Schema:
    """Returns the validated body. Raises `InvalidArgumentError`, which names the field."""
    content = _read_json(body)
    if not isinstance(content, dict):
        raise InvalidArgumentError("body", "must be a JSON object")
    if rb"\ud" in body.lower():
        _check_text(content, ())
    try:
        return schema.model_validate(_without_nulls(content))
    except ValidationError as error:
        raise _explained(error, content) from None


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidArgumentError("body", "is not valid UTF-8; text must be") from None
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError("body", f"is not JSON: {problem}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _without_nulls(content: dict[str, Any]) -> dict[str, Any]:
    """Drops nulls at the top and in messages: clients send null for fields they leave out."""
    kept = {name: value for name, value in content.items() if value is not None}
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [
            {name: value for name, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in kept["messages"]
        ]
    return kept


def _explained(error: ValidationError, content: dict[str, Any]) -> InvalidArgumentError:
    """Returns the error of the first invalid field. A field with a union type has an error for each
    kind: the one with the deepest location is the kind that was meant."""
    details = error.errors(include_url=False)
    of_first = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    detail = max(of_first, key=lambda one: len(one["loc"]))
    return InvalidArgumentError(_path(detail, content), _problem(detail))


def _path(detail: ErrorDetails, content: Any) -> str:
    """Returns a path as `messages[0].content`, without the names of union kinds in a location."""
    path, value = "", content
    for at, part in enumerate(detail["loc"], 1):
        is_missing = at == len(detail["loc"]) and detail["type"] == "missing"
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif is_missing or (isinstance(value, dict) and part in value):
            path += f".{part}" if path else part
            value = None if is_missing else value[part]
    return path or "body"


def _problem(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        return "is not supported here; leave it out"
    given, bound = detail["input"], detail["msg"].replace("Input should be", "must be")
    is_short = isinstance(given, str | int | float) and len(str(given)) <= _SHOWN_CHARS
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
