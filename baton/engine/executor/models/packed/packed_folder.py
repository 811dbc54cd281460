"""Folder of files of packed layers, by what they are packed of."""

import fcntl
import gc
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from baton.engine.executor.models.linear import Products
from baton.engine.executor.models.packed.packed_layers import (
    MappedLayers,
    NotPackedError,
    WritingLayers,
)
from baton.engine.executor.models.packed.tensor_file import TensorFile, is_whole, written
from baton_kernels.cpu.library import KERNELS, NoLibraryError, file_name

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 * 2**20
"""Weights below are packed in less time than matters, by each worker for itself."""

# What the layers of a file depend on, beside the C library.
_SOURCES = (
    "baton_kernels.cpu.panels",
    "baton_kernels.cpu.quantized_weight",
    "baton.engine.executor.models.fused_model",
    "baton.engine.executor.models.linear",
    "baton.engine.executor.models.packed.packed_layers",
    "baton.engine.executor.models.packed.tensor_file",
)
_FREE_TIMES = 2  # a file's size, which must be free before it is written
# A worker that packs a model of any size is done after this; one that stands still is not.
_WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.05
_SILENT_SECONDS = 1.0


class PackedLayers(Protocol):
    """Packed layers of a model."""

    def over(self, products: Products, build: Callable[[Products], object]) -> Products:
        """Returns products with the layers of `products`. `build` makes the model of them."""
        ...


class _OwnLayers:
    """`PackedLayers` of a worker that packs its own."""

    def over(self, products: Products, _build: Callable[[Products], object]) -> Products:
        return products


OWN_LAYERS: PackedLayers = _OwnLayers()


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """`PackedLayers` in a file that all workers of a host map.

    Attributes:
        folder: of all these files.
        weights: fingerprint of the model's weights, configuration and dtype.
        num_bytes: of the weights in memory, which the file takes about.
        max_bytes: maximum bytes of all files; those that were not used for longest give way.
    """

    folder: Path
    weights: bytes
    num_bytes: int
    max_bytes: int

    def over(self, products: Products, build: Callable[[Products], object]) -> Products:
        try:
            return MappedLayers(self._file(products, build), products.execution)
        except (NotPackedError, NoLibraryError, OSError, ValueError) as error:
            logger.info("this worker packs its weights for itself alone: %s", error)
            return products

    def _file(self, products: Products, build: Callable[[Products], object]) -> TensorFile:
        """Returns the file, which is written if it is not there. Raises what `over` catches."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / f"{self._key(products)}.weights"
        with _turn(path.with_suffix(".lock")):
            if not is_whole(path):
                self._make_room()
                self._write(path, products, build)
            os.utime(path)
            return TensorFile(path)

    def _write(self, path: Path, products: Products, build: Callable[[Products], object]) -> None:
        logger.info("packing weights for all workers of this host, once, into %s", path)
        with written(path) as writer:
            writing = WritingLayers(products, writer)
            build(writing)
            writer.finish(writing.records)
        gc.collect()  # what was built is in cycles, and would keep the checkpoint's pages mapped

    def _make_room(self) -> None:
        """Removes files that were not used for longest. Raises `OSError` if there is no room."""
        if self.num_bytes > self.max_bytes:
            raise OSError(
                f"{self.num_bytes:,} bytes are more than packed_weights_bytes ({self.max_bytes:,})"
            )
        files = [*self.folder.glob("*.weights"), *self.folder.glob("*.part")]
        found = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in files)
        excess = sum(size for _, size, _ in found) + self.num_bytes - self.max_bytes
        for _, size, file in found:
            if excess > 0:
                excess -= size
                file.unlink(missing_ok=True)  # workers that map it keep it
        if (free := shutil.disk_usage(self.folder).free) < _FREE_TIMES * self.num_bytes:
            raise OSError(f"the disk of {self.folder} has {free:,} bytes free, too few")

    def _key(self, products: Products) -> str:
        digest = hashlib.sha256(self.weights)
        digest.update(products.execution.encode())
        digest.update(file_name(KERNELS).encode())
        for content in _contents(_SOURCES):
            digest.update(content)
        return digest.hexdigest()[:32]


def _contents(modules: Sequence[str]) -> Iterator[bytes]:
    """Yields the sources of modules."""
    for name in modules:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        yield Path(spec.origin).read_bytes()


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Waits until no other worker is in the block of this file. Raises `OSError` after
    `_WAIT_SECONDS`."""
    began, is_said = time.monotonic(), False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > _WAIT_SECONDS:
                    raise OSError(f"{path} is held by another worker") from None
                if waited > _SILENT_SECONDS and not is_said:
                    is_said = True
                    logger.info("waiting for the worker that packs these weights")
                time.sleep(_POLL_SECONDS)
        yield
