"""Command that writes the description of a GGUF model: `python -m baton.models.gguf.convert FOLDER
FILE...`. Its last line of stderr is the reason if it fails."""

import json
import sys
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models.gguf.configuration import configuration, generation
from baton.models.gguf.header import read_header
from baton.models.gguf.tokenizer import write_tokenizer


def main(folder: str, *files: str) -> None:
    """Writes configuration and tokenizer of the model in `files` to a folder."""
    header = read_header([Path(file) for file in files])
    _write(configuration(header), Path(folder) / "config.json")
    if sampling := generation(header):
        _write(sampling, Path(folder) / "generation_config.json")
    write_tokenizer(header, Path(folder))


def _write(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UnsupportedModelError as error:
        sys.exit(str(error))
    except Exception as error:  # of the libraries that make the tokenizer
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        sys.exit(f"{sys.argv[2]!r} has a tokenizer that cannot be read: {reason}")
