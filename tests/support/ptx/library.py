"""Shared library of the machine: built by g++ when first needed, kept under the name of all that it
is made from."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parent / "machine"
_FLAGS: Final = (
    *("-std=c++17", "-O2", "-march=native", "-fPIC"),
    *("-fwrapv", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"),
)
_SECONDS: Final = 300.0


class NoMachineError(Exception):
    """The machine cannot be built here; the text says why."""


@cache
def load() -> ctypes.CDLL:
    """Returns the library, once per process. Raises `NoMachineError`."""
    return ctypes.CDLL(str(build(_folder())))


def build(folder: Path) -> Path:
    """Builds the library in `folder` unless it is there. Raises `NoMachineError`."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoMachineError("there is no C++ compiler: install g++, or set CXX")
    files = sorted(_SOURCES.iterdir())
    path = folder / f"machine-{_key(compiler, files)}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for this one's
        if not path.exists():
            _build(compiler, files, path)
    return path


def _build(compiler: str, files: list[Path], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        sources = [file for file in files if file.suffix == ".cpp"]
        objects = [Path(scratch, file.stem + ".o") for file in sources]
        compiles = [[*_FLAGS, "-c", s, "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(lambda arguments: _run(compiler, *arguments), compiles))
        built = Path(scratch, "machine.so")
        _run(compiler, "-shared", *objects, "-o", built)
        built.replace(path)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise NoMachineError(f"{command[0]} failed: {done.stderr.strip()[:1000]}")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "ptx"


def _key(compiler: str, files: list[Path]) -> str:
    state = Path(compiler).resolve().stat()
    made_by = (compiler, state.st_size, state.st_mtime_ns, _FLAGS, _cpu())
    digest = hashlib.sha256(repr(made_by).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """Returns the instruction sets of this CPU, for which the library is compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
