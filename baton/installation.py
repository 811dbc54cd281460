"""Command that installs what this installation of Baton lacks: `pip install`, in the form that fits
a checkout, a wheel on this machine, or a package of an index.

Reads the metadata that pip leaves (`direct_url.json`, PEP 610).
"""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "baton-serve"
_SOURCES = Path(__file__).resolve().parents[1]


def install_command(extra: str = "") -> str:
    """Returns the command of a shell that installs an extra; "" for what every process needs."""
    try:
        recorded = Distribution.from_name(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return _install("-e", str(_SOURCES), extra)
    return command_for(json.loads(recorded or "{}"), extra)


def command_for(origin: Mapping[str, Any], extra: str = "", prefix: str = sys.prefix) -> str:
    """Returns the same for an installation from `origin`, which is `direct_url.json`, or empty for
    one from an index, into the environment in the folder `prefix`."""
    url = urlsplit(origin.get("url", ""))
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return _install(NAME, extra, prefix=prefix)
    options = ["-e"] if origin.get("dir_info", {}).get("editable") else []
    return _install(*options, path, extra, prefix=prefix)


def package_command(requirement: str) -> str:
    """Returns the command that installs another package beside Baton."""
    return shlex.join([_pip(sys.prefix), "install", requirement])


def _install(*what: str, prefix: str = sys.prefix) -> str:
    *words, extra = what
    if extra:
        words[-1] += f"[{extra}]"
    return shlex.join([_pip(prefix), "install", *words])


def _pip(prefix: str) -> str:
    """Returns the environment's pip, by its path unless PATH finds it: another's would install
    elsewhere."""
    own = Path(prefix, "bin", "pip")
    is_first = shutil.which("pip") == str(own)
    return str(own) if own.exists() and not is_first else own.name
