"""Pytest plugin: kernels run on an emulated H100, `pytest -p tests.support.ptx.plugin -m emulated`.

PTX_MACHINE=compiler compiles kernels and runs nothing, which fills Triton's cache.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as tests/conftest.py

from tests.support.ptx.driver import Compiler, Machine, install


def _machine() -> Machine:
    if os.environ.get("PTX_MACHINE") == "compiler":
        return Compiler()
    from tests.support.ptx import library
    from tests.support.ptx.emulator import Emulator

    try:
        library.load()  # before any test's time is counted
    except library.NoMachineError as error:
        raise pytest.UsageError(f"kernels cannot be emulated: {error}") from error
    return Emulator.of_environment()


if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("TRITON_INTERPRET is 1; expected it unset: kernels run from their PTX.")
MACHINE = _machine()
install(MACHINE)
