"""Structure scanner for JSON bodies: counts elements, keys and depth while the bytes arrive.

An element is a string, list, object or comma. The field of the prompt has a bound of its own, and
so has each list of token ids in it. The scanner makes no object of what it counts, so that a body
is refused before it costs memory. It finds what a JSON parser would find up to the first error of
the syntax, and looks only for two errors: invalid UTF-8, and NaN and Infinity, which a parser would
find after megabytes.
"""

import codecs
import re
from dataclasses import replace

from baton.errors import ContextLengthError, InvalidArgumentError
from baton.sampling import MAX_BIASED_TOKENS
from baton.serving.bounds import Bounds, BoundsError, check_most
from baton_router.apis.edge.settings import BodyLimits
from baton_router.text.request_bounds import RequestLimits

_BODY, _REQUEST = BodyLimits(), RequestLimits()

MAX_PROMPTS = 128
MAX_KEYS = 128
MAX_DEPTH = 64
# Bytes that are scanned without a pause: at most 10 ms, of brackets alone.
PIECE_BYTES = 12 * 2**10

# What is too many, and what to do.
_OF_BODY = " strings, lists, objects and commas: split the request"

_SHOWN_BYTES = 40
_QUOTE = ord('"')
_LISTS_AND_OBJECTS = (b"[", b"]", b"{", b"}")
_STRUCTURAL = (b'"', *_LISTS_AND_OBJECTS)
# Where no run of elements begins: an end, or a list or object in another one.
_BRACKETS = re.compile(rb"[\]}]|[\[{][\[{]")

# Alone, since the engine then skips other bytes without trying to match them.
_TOKEN = re.compile(rb'["\[\]{}]')
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING_REST = re.compile(_REST, re.DOTALL)
_STRING = rb'"' + _REST + rb'"'
# With an N or I outside of strings, as in NaN and -Infinity.
_NO_NUMBER = re.compile(rb"-?\w*[NI]\w*")
# What begins and ends within an open list or object; `_NESTED`: also lists and objects in it.
_ITEMS = rb'[^"\[\]{}]++|' + _STRING
_FLAT = re.compile(rb"(?:%b)*+" % _ITEMS, re.DOTALL)
_NESTED = re.compile(rb"(?:%b|[\[{]%b[\]}])*+" % (_ITEMS, _FLAT.pattern), re.DOTALL)
_INNER = re.compile(rb"[\[{][^\[\]{}]*+[\]}]")


class StructureError(InvalidArgumentError):
    """Body with one of the errors. Its client may still be sending it."""


class PromptLengthError(BoundsError, ContextLengthError):
    """Prompt of more token ids than any model of the router takes."""


def bounds_of(
    max_model_len: int, body: BodyLimits = _BODY, request: RequestLimits = _REQUEST
) -> Bounds:
    """Returns the bounds of bodies for a model of this length in tokens, of which each message and
    each tool takes one at least, by the names of their schemas."""
    num_messages = min(request.max_messages, max_model_len)
    items = {
        "messages": num_messages,
        "input": num_messages,
        "tools": min(request.max_tools, max_model_len),
        "logit_bias": MAX_BIASED_TOKENS,
    }
    num_ids = 2 * MAX_PROMPTS + max(body.max_prompt_ids, max_model_len)
    prompts = ("prompt", "tokens")
    bounds = Bounds(
        max_elements=body.max_body_elements,
        max_elements_of=dict.fromkeys(prompts, num_ids),
        max_items_of={**items, **dict.fromkeys(prompts, max_model_len)},
        max_depth=MAX_DEPTH,
    )
    of_inputs = replace(
        bounds,
        max_elements_of={"input": 2 * request.max_inputs + request.max_input_tokens},
        max_items_of={**items, "input": max(max_model_len, request.max_inputs)},
    )
    return replace(bounds, of_kind={"EmbeddingRequest": of_inputs})


def _without_escapes(data: bytes) -> bytes:
    """Returns data of the same length without escaped quotes and backslashes."""
    return data.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in data else data


def _check_numbers(data: bytes, begin: int, end: int) -> None:
    """Raises `StructureError` for NaN and Infinity between strings."""
    if data.find(b"N", begin, end) >= 0 or data.find(b"I", begin, end) >= 0:
        found = _NO_NUMBER.search(data, begin, end)
        assert found is not None, "the pattern does not match its letters"
        shown = found[0][:_SHOWN_BYTES].decode(errors="replace")
        raise StructureError("body", f"is not JSON: has {shown}; expected numbers that are finite")


class Structure:
    """Structure of one body, of which pieces are fed in order.

    Attributes:
        num_elements: strings, lists, objects and commas so far, outside the prompt.
        num_keys: keys of all objects so far.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.num_keys = 0
        self._num_commas: list[int] = []  # of each open list or object, outermost first
        self.num_elements = 0
        self._num_prompt_elements = 0
        self._field = ""
        self._is_prompt = False
        self._key = b""
        self._expects_key = False
        self._in_string = False
        self._carried = b""  # a backslash, if the piece before ended with it
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, piece: bytes) -> None:
        """Counts the elements of the next piece. Raises `BoundsError` beyond a bound, and
        `StructureError` for the errors that are looked for."""
        try:
            self._decoder.decode(piece)
        except UnicodeDecodeError:
            raise StructureError("body", "is not valid UTF-8; text must be") from None
        data, self._carried = self._carried + piece, b""
        at = self._skip_string(data, 0) if self._in_string else 0
        if not any(character in data for character in _STRUCTURAL):
            self._count_separators(data, at, len(data))  # a long number or whitespace, perhaps
            return
        while True:
            if 1 < len(self._num_commas) < self._bounds.max_depth and not _BRACKETS.match(data, at):
                at = self._count_run(data, at)
            token = _TOKEN.search(data, at)
            if token is None:
                break
            begin = token.start()
            if begin > at:
                self._count_separators(data, at, begin)
            at = begin + 1
            if data[begin] == _QUOTE:
                self._count(1)
                self._in_string = True
                at = self._skip_string(data, at)
            elif data[begin] in b"[{":
                self._open()
            elif self._num_commas:
                self._num_commas.pop()
        self._count_separators(data, at, len(data))

    def _count_separators(self, data: bytes, begin: int, end: int) -> None:
        """Counts commas and keys between two strings or brackets."""
        _check_numbers(data, begin, end)
        self.num_keys += data.count(b":", begin, end)
        self._count_commas(data.count(b",", begin, end))

    def _count_run(self, data: bytes, begin: int) -> int:
        """Counts what begins and ends within the innermost list or object, faster than element by
        element, and returns where it ends."""
        if any(bracket in data for bracket in _LISTS_AND_OBJECTS):
            # The items of each list in a prompt are counted.
            run = (_FLAT if self._is_prompt else _NESTED).match(data, begin)
            assert run is not None, "the pattern matches nothing, too"
            end = run.end()
            between = _without_escapes(run[0]).split(b'"')
        else:
            between = _without_escapes(data[begin:]).split(b'"')
            end = len(data)
            if len(between) % 2 == 0:  # the last string goes on
                end -= len(between.pop()) + 1
        if end > begin:
            text = b"".join(between[::2])
            _check_numbers(text, 0, len(text))
            num_commas = text.count(b",")
            num_inner = text.count(b"[") + text.count(b"{")
            num_own_commas = _INNER.sub(b"", text).count(b",") if num_inner else num_commas
            self.num_keys += text.count(b":")
            self._count_commas(num_own_commas)
            self._count(len(between) // 2 + num_inner + num_commas - num_own_commas)
        return end

    def _skip_string(self, data: bytes, begin: int) -> int:
        """Returns where the string ends whose characters begin at `begin`, or its part here."""
        end = data.find(b'"', begin)
        if end < 0:
            end = len(data)
        if begin == 0 and b"\\" in data:  # once in a piece: the whole of it is masked
            masked = _without_escapes(data)
            end = masked.find(b'"')
            if end < 0:
                end = len(data) - masked.endswith(b"\\")
        elif data.find(b"\\", begin, end) >= 0:
            rest = _STRING_REST.match(data, begin)
            assert rest is not None, "the pattern matches nothing, too"
            end = rest.end()
        if self._expects_key:
            self._key += data[begin : min(end, begin + _SHOWN_BYTES)]
        if data[end : end + 1] == b'"':
            self._in_string = False
            self._end_key(self._key)
            return end + 1
        self._carried = data[end:]
        return len(data)

    def _end_key(self, key: bytes) -> None:
        """Notes the field that begins, if the string `key` is a key of the body."""
        if self._expects_key:
            self._field = key[:_SHOWN_BYTES].decode(errors="replace")
            self._is_prompt = self._field in self._bounds.max_elements_of
            self._key, self._expects_key = b"", False

    def _open(self) -> None:
        self._count(1)
        self._bounds.check_depth(len(self._num_commas) + 1, "body")
        self._expects_key = not self._num_commas
        self._num_commas.append(0)

    def _count_commas(self, num: int) -> None:
        if not num or not self._num_commas:
            return
        self._num_commas[-1] += num
        depth, num_items = len(self._num_commas), self._num_commas[-1] + 1
        if depth == 1:
            self._expects_key = True
            check_most(num_items, MAX_KEYS, "body", "keys")
        elif self._is_prompt:
            self._check_prompt(num_items)
        elif depth == 2:
            self._bounds.check_items(num_items, self._field)
        self._count(num)

    def _check_prompt(self, num_ids: int) -> None:
        most = self._bounds.max_items_of.get(self._field, num_ids)
        if num_ids > most:
            raise PromptLengthError(
                self._field,
                f"has {num_ids} token ids or more; this model's maximum context length is at most "
                f"{most} tokens. Shorten the prompt.",
                num_ids,
                most,
            )

    def _count(self, num: int) -> None:
        """Counts elements of the current field."""
        if self._is_prompt:
            self._num_prompt_elements += num
            num = self._num_prompt_elements
        else:
            self.num_elements += num
            num = self.num_elements
        self._bounds.check_elements(num, self._field, self._field or "body", _OF_BODY)
