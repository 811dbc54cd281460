"""Bundle of `make gpu` for a machine without a network: packages, and kernels compiled for its GPU.

`kernels.zip` has the binaries of a cache of Triton's, by their keys. A key covers Triton's version
and files, the kernel's source, its arguments' types and the target, but no path, so that another
machine with the same Triton and GPU finds them. The packages are in `site`.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BUNDLE: Final = Path(__file__).parents[2] / "dist" / "gpu-bundle"
_KERNELS: Final = "kernels.zip"
_SUFFIXES: Final = (".cubin", ".json")
_GROUP: Final = "__grp__"


def pack(cache: Path, bundle: Path) -> int:
    """Writes the compiled kernels of a cache to a bundle. Returns their number."""
    bundle.mkdir(parents=True, exist_ok=True)
    found = list(_compiled(cache))
    with zipfile.ZipFile(bundle / _KERNELS, "w", zipfile.ZIP_DEFLATED) as archive:
        for files in found:
            for file in files:
                archive.write(file, file.relative_to(cache))
    return len(found)


def _compiled(cache: Path) -> Iterator[list[Path]]:
    """Yields the files of each kernel whose compilation was finished."""
    for binary in sorted(cache.glob("*/*.cubin")):
        files = [binary.with_suffix(suffix) for suffix in _SUFFIXES]
        if all(file.is_file() for file in files):
            yield files


def unpack(bundle: Path, cache: Path) -> int:
    """Adds a bundle's kernels to a cache. Returns how many the cache did not have; 0 without a
    bundle. Triton finds a kernel by a file that names the places of the others."""
    if not (archive := bundle / _KERNELS).is_file():
        return 0
    with zipfile.ZipFile(archive) as kernels:
        names = [Path(name) for name in kernels.namelist() if name.endswith(".cubin")]
        new = [name for name in names if not (cache / _group_of(name)).exists()]
        for name in new:
            files = [name.with_suffix(suffix) for suffix in _SUFFIXES]
            kernels.extractall(cache, map(str, files))
            group = {file.name: os.fspath(cache / file) for file in files}
            (cache / _group_of(name)).write_text(json.dumps({"child_paths": group}))
    return len(new)


def _group_of(binary: Path) -> Path:
    return binary.with_name(f"{_GROUP}{binary.stem}.json")
