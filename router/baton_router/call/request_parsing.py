"""Parsing of one request's outputs: format, options, and ids of tool calls."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton_router.call.output_format import OutputFormat, OutputParser, ParsingOptions

_ID_CHARS = 24
_SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class RequestParsing:
    """Parsing of one request's outputs.

    Attributes:
        kept_tokens: special tokens that stay in the text, by token id.
        has_short_ids: ids of calls have 9 letters and digits, as Mistral's templates want them.
    """

    format: OutputFormat
    options: ParsingOptions
    kept_tokens: Mapping[int, str] = field(default_factory=dict)
    has_short_ids: bool = False

    def parser(self) -> OutputParser:
        """Returns a parser of one sequence."""
        return self.format.parser(self.options)

    def call_id(self, request_id: str, sequence_index: int, call_index: int) -> str:
        """Returns the id of a call, a function of the arguments: so it is the same wherever the
        request resumes."""
        name = f"{sequence_index}/{call_index}/{request_id}".encode()
        digest = hashlib.sha256(name).hexdigest()
        return digest[:_SHORT_ID_CHARS] if self.has_short_ids else f"call_{digest[:_ID_CHARS]}"
