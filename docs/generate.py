"""Generator of the reference in `docs/reference/` and of `docs/packages.svg`, from the code.

`--check` only compares. Run through `make reference`.
"""

import argparse
import sys
from pathlib import Path

from docs import (
    cli_reference,
    http_fields_reference,
    metrics_reference,
    models_reference,
    packages,
    protobuf_reference,
    symptoms_reference,
)
from docs import parameters_reference as parameters

DOCS = Path(__file__).resolve().parent
REFERENCE = "reference"


def generate() -> dict[str, str]:
    """Returns the contents of each generated file, by its path below `docs/`."""
    pages = {
        "cli.md": cli_reference.cli(),
        "settings.md": parameters.settings(),
        "metrics.md": metrics_reference.metrics(),
        "http_fields.md": http_fields_reference.http_fields(),
        "reported_symptoms.md": symptoms_reference.reported_symptoms(),
        "models.md": models_reference.models(),
        "errors.md": parameters.errors(),
        "sampling.md": parameters.sampling(),
        **{f"protobuf/{name}": text for name, text in protobuf_reference.pages().items()},
    }
    return {
        **{f"{REFERENCE}/{name}": text for name, text in pages.items()},
        "packages.svg": packages.picture(),
    }


def differences(fresh: dict[str, str], docs: Path = DOCS) -> list[str]:
    """Returns the paths below `docs` that differ, are missing or are no longer generated."""
    found = {str(path.relative_to(docs)) for path in (docs / REFERENCE).rglob("*.md")}
    return sorted(
        path
        for path in fresh.keys() | found
        if path not in fresh
        or not (docs / path).exists()
        or (docs / path).read_text(encoding="utf-8") != fresh[path]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    is_check = parser.parse_args().check
    fresh = generate()
    stale = differences(fresh)
    if is_check and stale:
        named = ", ".join(f"docs/{path}" for path in stale)
        sys.exit(f"{named}: not as docs/generate.py would write them; run `make reference`")
    for path in stale:
        target = DOCS / path
        if path in fresh:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(fresh[path], encoding="utf-8")
        else:
            target.unlink()


if __name__ == "__main__":
    main()
