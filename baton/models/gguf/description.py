"""Folder that describes a GGUF model as a checkpoint, in a cache of the user."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from baton.errors import UnsupportedModelError
from baton.models import GGUF, base_name
from baton.models.gguf.configuration import configuration
from baton.models.gguf.header import GgufHeader, files_in, parts_of, read_header
from baton.models.user_cache import user_cache

_FORMAT = 1  # of descriptions, to be raised with a change of what they contain


def gguf_files(path: Path) -> list[Path]:
    """Returns the GGUF files of a model that they alone describe: of a file, or of a folder; empty
    for any other. Raises `UnsupportedModelError` if a file of it is missing, or for several
    models."""
    if path.is_file() and path.suffix == GGUF:
        return parts_of(path)
    return files_in(path) if path.is_dir() and not _is_described(path) else []


def description_folder(files: Sequence[Path]) -> Path:
    """Returns the folder that describes the model in `files`; writes it unless the cache has it.
    Raises `UnsupportedModelError` for a model that is not read."""
    # Not where links lead: the hub's cache names files by their content.
    files = [file.parent.resolve() / file.name for file in files]
    folder = user_cache("gguf") / f"{base_name(files[0].name)}-{_key(files)}"
    if not folder.is_dir():
        _check(read_header(files))  # rather than in a process
        _write(files, folder)
    return folder


def _check(header: GgufHeader) -> None:
    configuration(header)
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise UnsupportedModelError(
            f"{str(header.files[0])!r} has no tokenizer; give a file with one, or the original "
            "checkpoint"
        )


def _is_described(folder: Path) -> bool:
    has_files = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    return has_files or any(folder.glob("*.safetensors"))


def _key(files: Sequence[Path]) -> str:
    """Returns a name for files as they are now, and for what describes them."""
    digest = hashlib.sha256(f"{_FORMAT} {version('transformers')}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _write(files: Sequence[Path], folder: Path) -> None:
    """Writes the folder aside and renames it, so that others see all of it or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    except OSError as error:
        raise UnsupportedModelError(
            f"cannot write the description of {str(files[0])!r}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error
    try:
        _convert(files, aside)
        for file in files:
            (aside / file.name).symlink_to(file)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _convert(files: Sequence[Path], folder: Path) -> None:
    """Runs the conversion in a process of its own: its libraries take hundreds of megabytes, which
    a router would keep."""
    ended = subprocess.run(  # noqa: S603 - this interpreter, and paths
        [sys.executable, "-m", "baton.models.gguf.convert", str(folder), *map(str, files)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
        raise UnsupportedModelError(last[0])
