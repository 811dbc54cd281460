"""Writer of grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from baton.errors import InvalidArgumentError
from baton.sampling import MAX_GRAMMAR_BYTES

# Whitespace as models are trained to write it, or none. Any whitespace would let a model write it
# without end.
_COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class Lark:
    """Grammar that is being written.

    Args:
        token_ids: special tokens, which text never matches, by their content.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        tokens = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, tokens)) + ")") if tokens else None

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule unless there is one of that name, and returns its name."""
        self._rules.setdefault(name, f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Returns an expression that matches `text`, with its special tokens as tokens."""
        pieces = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def is_token(self, text: str) -> bool:
        """Returns whether `text` is a special token."""
        return text in self._token_ids

    def text(self, without: Sequence[str] = (), first: Sequence[str] = ()) -> str:
        """Returns an expression that matches text.

        Args:
            without: marks that the text does not contain, also not spelled out.
            first: characters that it does not begin with, but for whitespace.
        """
        text = f"/{_text_regex(first)}/"
        if without:
            text += f" & ~/(?s:.*)({'|'.join(map(_escaped, without))})(?s:.*)/"
        return self._terminals.setdefault(text, f"TEXT{len(self._terminals)}")

    def until(self, mark: str, first: Sequence[str] = (), most_tokens: int | None = None) -> str:
        """Returns an expression that matches text and the first `mark` in it. Raises
        `InvalidArgumentError` if the text cannot be limited.

        Args:
            first: characters that the text does not begin with, but for whitespace.
            most_tokens: maximum number of tokens of the text.
        """
        name = f"until_{len(self._rules)}"
        if self.is_token(mark):
            if most_tokens == 0:
                return self.literal(mark)
            text = self.text([mark], first)
            if most_tokens is not None:
                text = self.rule(name, text, f"[max_tokens={most_tokens}]")
            return f"{text} {self.literal(mark)}"
        if most_tokens is not None:
            # llguidance takes what it has cut off for complete, also without the mark.
            raise InvalidArgumentError(
                "parsing.max_reasoning_tokens",
                f"is {most_tokens}, but the mark {mark!r} that ends reasoning is no token of the "
                "model's tokenizer; expected none. Limit `max_tokens` instead",
            )
        return self.rule(name, f"/{_text_regex(first)}{_escaped(mark)}/", "[lazy]")

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Returns an expression that matches JSON by a schema."""
        return "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False)

    def grammar(self, start: str, field: str = "parsing.tools", parts: str = "tools") -> str:
        """Returns the grammar, with `start` as the body of its first rule. Raises
        `InvalidArgumentError` if it is too long for a worker.

        Args:
            field, parts: those with the schemas, for the error.
        """
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        text = "\n".join([f"start: {start}", *self._rules.values(), *terminals])
        num_bytes = len(text.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidArgumentError(
                field,
                f"their schemas need a grammar of {num_bytes} bytes; expected at most "
                f"{MAX_GRAMMAR_BYTES}. Send fewer or smaller {parts}",
            )
        return text

    def _piece(self, piece: str) -> str:
        if piece in self._token_ids:
            return f"<[{self._token_ids[piece]}]>"
        return json.dumps(piece, ensure_ascii=False)


def _text_regex(first: Sequence[str]) -> str:
    if not first:
        return "(?s:.*)"
    return rf"(\s*[^\s{''.join(map(_escaped, first))}](?s:.*))?"


def _escaped(text: str) -> str:
    """Returns a regular expression for `text`, without slashes, which would end it in Lark."""
    return re.escape(text).replace("/", r"\/")
