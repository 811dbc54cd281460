"""Removes from the router's virtual environment what a router does not import.

    python strip.py ROOT

A router runs no model, and most of transformers is their code. What configurations, tokenizers and
processors import stays: with these a router reads prompts and images.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

# Beginnings of file names in the folders of models; those of compiled files are equal.
_KEPT = ("__init__.", "configuration_", "image_processing_", "processing_", "tokenization_")
# What compilers and type checkers read.
_SOURCES = frozenset({".a", ".c", ".h", ".pxd", ".pyi", ".pyx"})
# Folder of the tables that name the classes of all models.
_TABLES = "auto"


def strip(root: Path) -> int:
    """Removes these files of a virtual environment; returns their bytes."""
    (packages,) = root.glob("lib/python*/site-packages")
    files = set(_not_imported(packages))
    num_bytes = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    return num_bytes


def _not_imported(packages: Path) -> Iterator[Path]:
    for folder in (packages / "transformers" / "models").iterdir():
        if folder.name != _TABLES:
            yield from (file for file in _files(folder) if not file.name.startswith(_KEPT))
    for folder in (packages / "numpy").rglob("tests"):
        yield from _files(folder)
    yield from (file for file in _files(packages) if file.suffix in _SOURCES)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    print(f"removed {strip(Path(sys.argv[1])) / 1e6:.0f} MB that a router does not import")
