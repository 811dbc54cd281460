"""Files of tensors: one after the other, then a record in JSON that says where each is."""

import json
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

_ALIGNMENT = 64  # bytes of a line of a cache
# At the end: bytes of the record before it, and a mark without which the file is not whole.
_END: Final = struct.Struct("<Q8s")
_MARK = b"baton-t1"


class TensorFileWriter:
    """Writer of one file, which is at its beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, tensor: torch.Tensor) -> list[Any]:
        """Writes a tensor of at least one dimension; returns what its record has of it."""
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        place = self._file.tell()
        self._file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        return [place, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    def finish(self, record: Any) -> None:
        """Writes the record, which makes the file whole."""
        content = json.dumps(record).encode()
        self._file.write(content + _END.pack(len(content), _MARK))
        self._file.flush()


class TensorFile:
    """Whole file, mapped. Its pages are read when they are first used, and are those of all
    processes that map it; a tensor keeps the mapping.

    Attributes:
        record: what `finish` was given.

    Raises `OSError` for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # In huge pages where the file system has them, as ext4 from Linux 6.16 on:
        # decoding reads every weight at each step, and waits at each page's end.
        with suppress(AttributeError, OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start = len(self._mapping) - _END.size
        length, _ = _END.unpack_from(self._mapping, start)
        self.record: Final = json.loads(self._mapping[start - length : start])

    def tensor(self, found: list[Any]) -> torch.Tensor:
        """Returns a tensor by what `add` returned of it. Nothing that is written to it is kept."""
        place, name, shape = found
        dtype: torch.dtype = getattr(torch, name)
        count = torch.Size(shape).numel()
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=place).view(shape)


def is_whole(path: Path) -> bool:
    """Returns whether there is a file, and its writer had come to its end. Raises `OSError`."""
    if not path.exists() or path.stat().st_size < _END.size:
        return False
    with path.open("rb") as file:
        file.seek(-_END.size, SEEK_END)
        return bool(_END.unpack(file.read())[1] == _MARK)


@contextmanager
def written(path: Path) -> Iterator[TensorFileWriter]:
    """Gives the writer of a file that is there, whole, once the block ends without an error."""
    aside = path.with_suffix(".part")
    try:
        with aside.open("wb") as file:
            yield TensorFileWriter(file)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
