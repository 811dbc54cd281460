"""C libraries of the host: built by the machine's C compiler when first needed, and kept.

A library is kept under the name of all that it depends on (sources, compiler, flags and CPU), so
that hosts of different CPUs may share the folder. None has an OpenMP of its own: attention finds
the one that torch has loaded, and so shares its threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
_COMPILERS = ("gcc", "cc")
_SECONDS = 120.0
_BUILT = "library.so"


@dataclass(frozen=True, slots=True)
class Library:
    """C library.

    Attributes:
        sources: its files in this package that are compiled.
        headers: those that these include.
        flags: flags of its compilation, beside those of all libraries.
    """

    name: str
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


KERNELS = Library(
    "kernels",
    sources=("linear.c", "paged_attention.c", "recording.c", "rowwise.c"),
    headers=(
        "bfloat16.h",
        "linear_of_format.h",
        "paged_attention_of_dtype.h",
        "paged_attention_tiles.h",
        "rowwise_of_dtype.h",
        "vectors.h",
    ),
    flags=("-fopenmp",),
)
DECODE_INPUTS = Library("decode_inputs", ("decode_inputs.c",))


class NoLibraryError(Exception):
    """A library cannot be built or loaded here; the text says why."""


@cache
def load(library: Library) -> ctypes.CDLL:
    """Returns a library, once per process. Raises `NoLibraryError`."""
    path = build(library, _folder())
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error


def file_name(library: Library) -> str:
    """Returns the name of the library's file, which a change of anything it is made from changes.
    Raises `NoLibraryError`."""
    return f"{library.name}-{_key(_compiler(), library.flags, _sources(library))}.so"


def build(library: Library, folder: Path) -> Path:
    """Builds a library in `folder` unless it is there. Raises `NoLibraryError`."""
    compiler, sources = _compiler(), _sources(library)
    path = folder / file_name(library)
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for name, content in sources.items():
                (Path(scratch) / name).write_bytes(content)
            _compile(compiler, library, Path(scratch))
            (Path(scratch) / _BUILT).replace(path)  # at once: other processes build it too
    except OSError as error:
        raise NoLibraryError(f"it cannot be built in {folder}: {error}") from error
    return path


def _compile(compiler: str, library: Library, folder: Path) -> None:
    objects = [str(Path(name).with_suffix(".o")) for name in library.sources]
    flags = [*_FLAGS, *library.flags, "-c"]
    with ThreadPoolExecutor(len(library.sources)) as threads:  # each waits for a process
        each = [threads.submit(_run, compiler, [*flags, name], folder) for name in library.sources]
    for compiled in each:
        compiled.result()
    _run(compiler, ["-shared", *objects, "-o", _BUILT], folder)  # without -fopenmp: torch has it


def _run(compiler: str, arguments: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            [compiler, *arguments], cwd=folder, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NoLibraryError(f"{compiler} took more than {_SECONDS:g} s") from error
    if done.returncode:
        raise NoLibraryError(f"{compiler} failed: {done.stderr.strip()[:400]}")


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, _compilers())), None)
    if compiler is None:
        tried = ", ".join(_compilers())
        raise NoLibraryError(f"there is no C compiler ({tried}): install gcc, or set CC")
    return compiler


def _sources(library: Library) -> dict[str, bytes]:
    names = library.sources + library.headers
    return {name: (files(__package__) / name).read_bytes() for name in names}


def _compilers() -> tuple[str, ...]:
    chosen = os.environ.get("CC")
    return (chosen,) if chosen else _COMPILERS


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "baton" / "kernels"
    except RuntimeError as error:
        raise NoLibraryError(f"there is no folder to keep it in: {error}") from error


def _key(compiler: str, flags: tuple[str, ...], sources: dict[str, bytes]) -> str:
    """Returns a name for the library that a change of anything it is made from changes."""
    state = Path(compiler).resolve().stat()
    made_by = (str(Path(compiler).resolve()), state.st_size, state.st_mtime_ns, _FLAGS, flags)
    digest = hashlib.sha256(repr((made_by, _cpu())).encode())
    for content in sources.values():
        digest.update(content)
    return digest.hexdigest()[:24]


def instruction_sets() -> frozenset[str]:
    """Returns the instruction sets of this CPU, as the kernel names them; none if it does not."""
    return frozenset(_cpu().split())


def _cpu() -> str:
    """Returns the kernel's line of this CPU's instruction sets, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.machine())
