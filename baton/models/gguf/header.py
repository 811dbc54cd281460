"""Header of a GGUF model: its metadata, and where its tensors are. Reads no values of tensors."""

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models import GGUF, base_name, check_is_no_pointer
from baton.models.gguf.tensor_types import TENSOR_TYPES, TensorType, refusal

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Formats of values by the number of their type; strings and arrays are read apart.
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # unless the metadata name another
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place of a tensor's values.

    Attributes:
        shape: as torch has it, the innermost dimension last.
        start: offset of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    file: Path
    start: int

    @property
    def stored_as(self) -> TensorType:
        return TENSOR_TYPES[self.type_number]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.stored_as.block_size * self.stored_as.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata of a model's first file, and the tensors of all its files by name."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def read_header(files: Sequence[Path]) -> GgufHeader:
    """Reads the headers of a model's files, in their order. Raises `UnsupportedModelError` for a
    file that is damaged or incomplete, and for a tensor of a type that is not served."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        of_file, found = _read_file(file)
        metadata = metadata or of_file
        tensors |= found
    num_parts = metadata.get("split.count", 0) or 1
    if len(files) != num_parts:
        raise UnsupportedModelError(
            f"{str(files[0])!r} is of a model in {num_parts} files; expected all of them in one "
            "folder, under the names that they were made with"
        )
    return GgufHeader(tuple(files), metadata, tensors)


def files_in(folder: Path) -> list[Path]:
    """Returns the files of the GGUF model in a folder; empty if there is none. Raises
    `UnsupportedModelError` for several, and as `parts_of`."""
    files = sorted(folder.glob(f"*{GGUF}"))
    models = {base_name(file.name): file for file in reversed(files)}
    if len(models) > 1:
        raise UnsupportedModelError(
            f"{str(folder)!r} holds {len(models)} GGUF models; give one of them, such as "
            f"{str(min(models.values()))!r}"
        )
    return parts_of(files[0]) if files else []


def parts_of(file: Path) -> list[Path]:
    """Returns the files of a model of which `file` is one. Raises `UnsupportedModelError` if
    another one is missing."""
    named = _PART.search(file.name)
    if named is None:
        return [file]
    stem, total = file.name[: named.start()], int(named[2])
    parts = [file.with_name(f"{stem}-{n:05}-of-{named[2]}.gguf") for n in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UnsupportedModelError(
            f"{str(file.parent)!r} lacks {len(missing)} of {total} files of a GGUF model, "
            f"{missing[0]} among them; download them too"
        )
    return parts


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        magic = opened.read(len(_MAGIC))
        if magic != _MAGIC:
            check_is_no_pointer(file)
            raise UnsupportedModelError(
                f"{str(file)!r} begins with {magic!r}; expected {_MAGIC!r}: it is no GGUF file, "
                "download it again"
            )
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                metadata, tensors = _Reader(mapped, file).read()
            except (struct.error, EOFError) as error:
                raise UnsupportedModelError(
                    f"{str(file)!r} ends after {size} bytes, within its header; download it again"
                ) from error
            except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                raise UnsupportedModelError(
                    f"{str(file)!r} has no header of GGUF: {error}; download it again"
                ) from error
    end = max((t.start + t.num_bytes for t in tensors.values()), default=0)
    if size < end:
        raise UnsupportedModelError(
            f"{str(file)!r} has {size} bytes; its header describes {end}. Download it again"
        )
    return metadata, tensors


class _Reader:
    """Position in a mapped file."""

    def __init__(self, mapped: mmap.mmap, file: Path) -> None:
        self._mapped = mapped
        self._file = file
        self._at = len(_MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version, num_tensors, num_values = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{str(self._file)!r} is GGUF of version {version}; expected {_VERSIONS[0]} or "
                f"{_VERSIONS[1]}: convert the model again"
            )
        metadata = {self._string(): self._value() for _ in range(num_values)}
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        data = -(-self._at // alignment) * alignment
        return metadata, {t.name: replace(t, start=data + t.start) for t in tensors}

    def _tensor(self) -> GgufTensor:
        """Returns a tensor whose place is counted from the first one's."""
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        number, start = self._unpack("IQ")
        if number not in TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{str(self._file)!r} has a tensor {name} {refusal(number)}: give a file in it"
            )
        if shape[-1] % (block_size := TENSOR_TYPES[number].block_size):
            raise ValueError(f"rows of {name} have {shape[-1]} values, in blocks of {block_size}")
        return GgufTensor(name, shape, number, self._file, start)

    def _value(self) -> Any:
        (kind,) = self._unpack("I")
        if kind != _ARRAY:
            return self._string() if kind == _STRING else self._unpack(_FORMATS[kind])[0]
        kind, count = self._unpack("IQ")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return list(self._unpack(f"{count}{_FORMATS[kind]}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        content = self._mapped[self._at : self._at + length]
        if len(content) < length:
            raise EOFError
        self._at += length
        return content.decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._mapped, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values
