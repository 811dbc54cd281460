"""Recorded workloads: the Mooncake and the Azure format, row by row.

Nothing is kept in memory and nothing is guessed: a row that is not as its format says ends the
reading with its file, line and field. Knows nothing of what is done with the rows.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

MOONCAKE_BLOCK_SIZE = 512  # tokens behind one hash id

_FOLDER_VARIABLE = "BATON_TRACES"
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_T = TypeVar("_T")


class TraceError(ValueError):
    """A row that is not as its format says; the text names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceImage:
    """Image of a prompt: the tokens [start, start + num_tokens), which an encoder fills. Equal
    `content` means an equal image, of as many tokens."""

    start: int
    num_tokens: int
    content: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        arrival: seconds since the start of the trace.
        num_prompt_tokens: tokens of the prompt, those of its images included.
        num_output_tokens: tokens of the answer.
        block_ids: one id per block of the prompt, the last one perhaps not full; equal ids mean an
            equal prefix up to and including that block. None: the format does not say.
        images: in order and without overlap.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] | None = None
    images: tuple[TraceImage, ...] = ()


def trace_folder() -> Path:
    """Returns the folder of traces: `BATON_TRACES`, or else `shared/traces` beside the repository.
    It may not exist."""
    given = os.environ.get(_FOLDER_VARIABLE)
    return Path(given) if given else Path(__file__).parents[4] / "shared" / "traces"


def read_trace(path: Path, image_tokens: int = 0) -> Iterator[TraceRow]:
    """The rows of a trace in the format that its ending tells: `.jsonl` or `.csv`.

    Args:
        image_tokens: tokens of each image of an Azure trace, as far as its prompt has so many; 0:
            its images are text.

    Raises:
        TraceError: the ending is another one, or a row is malformed.
        OSError: it cannot be read.
    """
    if path.suffix == ".jsonl":
        return read_mooncake(path)
    if path.suffix == ".csv":
        return read_azure(path, image_tokens)
    raise TraceError(f"{path}: a trace ends in .jsonl or .csv")


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """The rows of a Mooncake trace: a JSON object a line with `timestamp` in milliseconds,
    `input_length`, `output_length` and `hash_ids`, one per 512 tokens of the prompt.

    Raises:
        TraceError: a row is malformed, or comes before the one above it.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        latest = 0.0
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _mooncake_row(_Where(path, number), line)
                _Where(path, number).in_order("timestamp", latest, row.arrival)
                latest = row.arrival
                yield row


def read_azure(path: Path, image_tokens: int = 0) -> Iterator[TraceRow]:
    """The rows of an Azure trace: CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, and
    in a multimodal trace `NumImages`. Its context tokens include those of images, which begin the
    prompt and are all different.

    Arrivals count from the first row.

    Raises:
        TraceError: a column is missing, a row is malformed, or comes before the one above it.
        OSError: it cannot be read.
    """
    start: datetime | None = None
    latest = 0.0
    for where, values in _azure_values(path):
        time = where.read(values, "TIMESTAMP", _instant)
        start = start or time
        arrival = (time - start).total_seconds()
        where.in_order("TIMESTAMP", latest, arrival)
        latest = arrival
        num_prompt_tokens = where.read(values, "ContextTokens", _decimal)
        num_images = where.read(values, "NumImages", _decimal) if "NumImages" in values else 0
        yield TraceRow(
            arrival,
            num_prompt_tokens,
            where.read(values, "GeneratedTokens", _decimal),
            images=_different(where.line, num_images, num_prompt_tokens, image_tokens),
        )


def _different(
    line: int, num_images: int, num_prompt_tokens: int, image_tokens: int
) -> tuple[TraceImage, ...]:
    """Returns the images at the beginning of a prompt; less of each where it is too short."""
    length = min(image_tokens, num_prompt_tokens // max(1, num_images))
    numbers = range(num_images if length else 0)
    return tuple(TraceImage(i * length, length, line << 32 | i) for i in numbers)


@dataclass(frozen=True, slots=True)
class _Where:
    """A line of a file."""

    path: Path
    line: int

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.line}, field {field}: {problem}")

    def read(self, values: Mapping[str, object], field: str, reader: Callable[[object], _T]) -> _T:
        """One field, as `reader` understands it; what it raises says what was wrong."""
        if values.get(field) is None:
            raise self.error(field, "missing")
        try:
            return reader(values[field])
        except ValueError as error:
            raise self.error(field, str(error)) from error

    def in_order(self, field: str, latest: float, arrival: float) -> None:
        if arrival < latest:
            raise self.error(field, "comes before the row above it")


def _azure_values(path: Path) -> Iterator[tuple[_Where, Mapping[str, object]]]:
    """The rows as they stand in the file, once all columns are there."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for field in _AZURE_FIELDS:
                if field not in (reader.fieldnames or ()):
                    raise _Where(path, 1).error(field, "missing")
            for values in reader:
                yield _Where(path, reader.line_num), values
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: is not CSV: {error}") from error


def _mooncake_row(where: _Where, line: str) -> TraceRow:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where.path}, line {where.line}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise TraceError(f"{where.path}, line {where.line}: is no JSON object")
    num_prompt_tokens = where.read(values, "input_length", _count)
    block_ids = where.read(values, "hash_ids", _counts)
    expected = -(-num_prompt_tokens // MOONCAKE_BLOCK_SIZE)
    if len(block_ids) != expected:
        raise where.error("hash_ids", f"has {len(block_ids)} ids; the prompt has {expected} blocks")
    return TraceRow(
        where.read(values, "timestamp", _number) / 1000,
        num_prompt_tokens,
        where.read(values, "output_length", _count),
        block_ids,
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return tuple(map(_count, value))


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise ValueError(f"{value!r} is no time")
    return value


def _decimal(value: object) -> int:
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()):
        raise ValueError(f"{value!r} is no count")
    return int(value)


def _instant(value: object) -> datetime:
    """Reads `2023-11-16 18:17:03.9799600`; the seventh decimal is beyond a `datetime`."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no time")
    whole, _, decimals = value.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{decimals[:6]:0<6}")
    except ValueError as error:
        raise ValueError(f"{value!r} is no time") from error
