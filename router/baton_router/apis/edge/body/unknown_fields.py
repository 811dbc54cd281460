"""Unknown fields of request bodies: ignored and named to the client, or refused.

A schema with `forbid_unknown_fields=False` takes fields that it does not list. Those that would
change the answer are refused by name, whatever the setting.
"""

import difflib
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from starlette.types import Scope

from baton.cluster.throttled_log import ThrottledLog
from baton.errors import InvalidArgumentError
from baton_router.apis.edge.body.objects import Objects, objects_of
from baton_router.apis.edge.body.other_servers import OF_MESSAGES, OTHER_FIELDS

logger = logging.getLogger(__name__)

OTHER = "other"
IGNORED_FIELDS = "baton.ignored"
"""Key of a request's scope: the value of the header `IGNORED`, if fields were ignored."""

_MAX_FOUND = 64
_MAX_NAMED = 16
_MAX_GUESSES = 4
_MAX_LOGGED_KINDS = 256
_SHOWN_CHARS = 40
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)

_ANY = object()
# Fields that clients send by themselves and that may be ignored, and the values that
# `--http-unknown-fields refuse` takes, too.
HINTS: Mapping[str, Any] = {
    "cache_control": _ANY,
    "context_management": (),
    "eager_input_streaming": _ANY,
    "generate_summary": (),
    "guided_decoding_backend": (),
    "include": ([],),
    "inference_geo": (),
    "is_error": (False,),
    "max_tool_calls": (),
    "metadata": _ANY,
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": _ANY,
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "request_id": (),
    "safety_identifier": _ANY,
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "stream_options": (),
    "summary": (),
    "user": _ANY,
    "verbosity": (),
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """Unknown field of a body.

    Attributes:
        path: with the index of its first occurrence, as in `messages[0].flavour`.
        place: the same without indices, as in `messages[].flavour`.
        known: names that its object has.
    """

    path: str
    place: str
    name: str
    value: Any
    known: frozenset[str]

    @property
    def guess(self) -> str:
        """Returns the known name that the client probably meant, as a question, or ""."""
        if self.name in HINTS:
            return ""
        close = difflib.get_close_matches(self.name[:_SHOWN_CHARS], sorted(self.known), 1, 0.8)
        return f" (did you mean {close[0]}?)" if close else ""


class UnknownFields:
    """Policy for unknown fields, which counts those that it ignores.

    Attributes:
        num_ignored: fields by name, where they are `HINTS`; all others under `OTHER`.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        """`refuses`: an unknown field fails its request, unless its value is one of a hint's that
        changes nothing."""
        self._refuses = refuses
        self.num_ignored: Counter[str] = Counter(dict.fromkeys((*HINTS, OTHER), 0))
        self._log = ThrottledLog(logger)
        self._logged: set[str] = set()

    def note(self, scope: Scope, found: Sequence[Unknown]) -> None:
        """Names the fields in the header of the answer to the request of `scope`, counts and logs
        them. Raises `InvalidArgumentError` for the first one that is refused."""
        if self._refuses:
            for unknown in found:
                if not _is_one_of(unknown.value, HINTS.get(unknown.name, ())):
                    raise InvalidArgumentError(
                        _shown(unknown.path),
                        f"is not supported here{unknown.guess}; leave it out",
                    )
        named = []
        for at, unknown in enumerate(found):
            self.num_ignored[unknown.name if unknown.name in HINTS else OTHER] += 1
            if at < _MAX_NAMED:
                guess = unknown.guess if at < _MAX_GUESSES else ""
                named.append(_shown(unknown.place) + guess)
                self._warn(named[-1])
        if len(found) > _MAX_NAMED:
            named.append(f"and {len(found) - _MAX_NAMED} more")
        if named:
            scope[IGNORED_FIELDS] = ", ".join(named)

    def _warn(self, named: str) -> None:
        """Logs the name at most once a minute; of names beyond a bound only that they exist."""
        if named in self._logged or len(self._logged) < _MAX_LOGGED_KINDS:
            self._logged.add(named)
        else:
            named = "others"
        self._log.warning(f"a request has a field that is ignored: {named}")


def find_unknown(content: dict[str, Any], schema: type[msgspec.Struct]) -> list[Unknown]:
    """Returns the unknown fields of a body that is valid by `schema`; nulls are absent.

    Raises `InvalidArgumentError` for the first one that would change the answer.
    """
    found: dict[str, Unknown] = {}
    for name, neutral in _refused_of(schema).items():
        if content.get(name, neutral) not in (None, neutral):
            raise _refusal(name)
    objects = objects_of(schema)
    if objects is not None:
        _walk(content, objects, "", "", found)
    return list(found.values())


@lru_cache(maxsize=64)
def _refused_of(schema: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Returns the fields that a schema lacks of the one that its bodies become (`becomes`), with
    the values that change nothing."""
    becomes: type[msgspec.Struct] | None = getattr(schema, "becomes", None)
    if becomes is None:
        return {}
    known = {f.encode_name for f in msgspec.structs.fields(schema)}
    kept = known | HINTS.keys() | OTHER_FIELDS.keys()
    return {
        f.encode_name: f.default if f.default is not msgspec.NODEFAULT else f.default_factory()
        for f in msgspec.structs.fields(becomes)
        if f.encode_name not in kept
    }


def _refusal(path: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        path, "is not supported here, and would change the answer; leave it out"
    )


def _walk(value: Any, objects: Objects, path: str, place: str, found: dict[str, Unknown]) -> None:
    if isinstance(value, list):
        for at, item in enumerate(value):
            _walk(item, objects, f"{path}[{at}]", f"{place}[]", found)
    if not isinstance(value, dict):
        return
    objects = objects.of(value)
    path, place = (f"{path}.", f"{place}.") if path else ("", "")
    if objects.names is not None and not value.keys() <= objects.names:
        for name in (name for name in value if name not in objects.names):
            if value[name] is None:
                continue
            other = OTHER_FIELDS.get(name)
            is_here = not path or name in OF_MESSAGES
            if other is not None and is_here and value[name] not in other.neutral:
                raise _refusal(path + name)
            if len(found) < _MAX_FOUND:
                unknown = Unknown(path + name, place + name, name, value[name], objects.names)
                found.setdefault(unknown.place, unknown)
    for name, inner in objects.nested.items():
        if name in value:
            _walk(value[name], inner, path + name, place + name, found)


def _is_one_of(value: Any, accepted: Any) -> bool:
    return accepted is _ANY or value in accepted


def _shown(path: str) -> str:
    """Returns the path without what a header or a log cannot hold."""
    return _UNSAFE.sub("?", path[: 2 * _SHOWN_CHARS])
