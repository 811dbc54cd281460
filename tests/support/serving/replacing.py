"""Certificates that take the place of others, while these are in use."""

from pathlib import Path

from baton.cli.certs import Issued


def replace(folder: Path, **issued: Issued) -> None:
    """Each file at once, but one file after the other."""
    for name, one in issued.items():
        for suffix, content in (("pem", one.cert), ("key", one.key)):
            new = folder / f"{name}.{suffix}.new"
            new.write_bytes(content)
            new.rename(folder / f"{name}.{suffix}")
