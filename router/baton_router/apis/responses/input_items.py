"""Input of a stored response as a list of items, in the shape of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from baton.errors import InvalidArgumentError, NotFoundError
from baton_router.apis.answers.answer_writer import Json

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_ORDERS = ("asc", "desc")
# Of types whose items have a status, as OpenAI's API lists them.
_WITH_STATUS = frozenset({"message", "function_call", "function_call_output"})


class ItemList(Struct, frozen=True, kw_only=True):
    """Response body of `/v1/responses/{id}/input_items`."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


def listed(items: Sequence[Json], query: Mapping[str, str]) -> ItemList:
    """Returns a part of the items, by the parameters `limit`, `order` and `after` of the query.

    Raises `InvalidArgumentError`, and `NotFoundError` for an item that is not there.
    """
    limit, order, after = _limit(query), query.get("order", "desc"), query.get("after")
    if order not in _ORDERS:
        raise InvalidArgumentError("order", f"is {order[:40]!r}; expected asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item.get("id") for item in ordered]
        if after not in ids:
            raise NotFoundError(f"after: item {after[:64]!r} is none of this response's input")
        ordered = ordered[ids.index(after) + 1 :]
    shown = [_shown(item) for item in ordered[:limit]]
    return ItemList(
        data=shown,
        first_id=shown[0].get("id") if shown else None,
        last_id=shown[-1].get("id") if shown else None,
        has_more=len(ordered) > limit,
    )


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(_DEFAULT_LIMIT))
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) < 4 else 0
    if not 1 <= limit <= _MAX_LIMIT:
        problem = f"is {given[:40]!r}; expected a number in [1, {_MAX_LIMIT}]"
        raise InvalidArgumentError("limit", problem)
    return limit


def _shown(item: Json) -> Json:
    """Returns an item with the fields that a client may leave out."""
    kind = item.get("type", "message")
    shown = {"status": "completed", **item} if kind in _WITH_STATUS else dict(item)
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        is_own = item.get("role") == "assistant"
        content = [{"type": "output_text" if is_own else "input_text", "text": content}]
    if kind == "message" and isinstance(content, list):
        shown["content"] = [_part(part) for part in content]
    return shown


def _part(part: Any) -> Any:
    match part:
        case {"type": "output_text"}:
            return {"annotations": [], "logprobs": [], **part}
        case {"type": "input_image"}:
            return {"detail": "auto", **part}
    return part
