"""C compiler for Triton, which builds a small module when the first kernel is launched on a GPU.

Looks for the compiler where Triton does. CPUs need none.
"""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from baton.cli.checks.finding import Finding, fault, ok

_SUBJECT = "C compiler"
_NEEDED_BY = "Triton compiles a module with it when a GPU's first kernel is launched"
INSTALL_COMPILER = "on Debian: apt-get install gcc libc6-dev python3-dev"
_TIMEOUT = 30.0  # seconds
_SOURCE = "#include <Python.h>\n#include <stdlib.h>\n"


def compiler() -> Finding:
    """Builds a module that includes what Triton's does. Blocks the thread for up to 30 s."""
    name = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if name is None:
        return fault(_SUBJECT, f"neither gcc nor clang is on PATH; {_NEEDED_BY}", INSTALL_COMPILER)
    if why := _built_by(name):
        return fault(
            _SUBJECT,
            f"{name} compiles no module for Python ({why}); {_NEEDED_BY}",
            INSTALL_COMPILER,
        )
    return ok(_SUBJECT, f"{name} compiles modules for Python")


def _built_by(name: str) -> str:
    """Returns why the compiler `name` builds no module; empty if it builds one."""
    # Debian's Python installs below /usr/local, but has its headers at the usual place.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_path("include", scheme)
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as folder:
        line = [name, "-x", "c", "-", f"-I{headers}", "-shared", "-fPIC"]
        try:
            done = subprocess.run(  # noqa: S603 - Triton runs the same program
                [*line, "-o", str(Path(folder) / "module.so")],
                input=_SOURCE,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines() or [f"it exits with {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[-1])
