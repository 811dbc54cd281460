"""Pytest hooks for tests of kernels that Triton interprets (TRITON_INTERPRET=1), that are emulated
from their PTX (-p tests.support.ptx.plugin), or that a GPU runs.

A conftest imports the hooks for its folder. A process either interprets kernels or compiles them,
from the moment that Triton is imported, so that a run on the CPU deselects all other tests.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.repository import ROOT

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_EMULATED = "tests.support.ptx.plugin" in sys.modules
ON_CPU = IS_INTERPRETED or IS_EMULATED
_MARKER = "interpreted" if IS_INTERPRETED else "emulated" if IS_EMULATED else "gpu"


def pytest_configure(config: pytest.Config) -> None:
    # Infinities are as good as any number on a GPU, and numpy warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    if IS_INTERPRETED:
        _mend_triton()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test by what runs it (ADR 0050). The interpreter runs the quick ones, in make test;
    the emulator the quick ones of one kernel and the slow ones of whole engines, in make test-full,
    and all others in make nightly."""
    marks = {mark.name for mark in item.iter_markers()}
    is_quick, is_nightly = marks.isdisjoint({"slow", "nightly"}), "nightly" in marks
    is_of_one_kernel = "kernels" in item.path.relative_to(ROOT).parts
    if IS_EMULATED:
        item.add_marker("slow" if not is_nightly and is_quick == is_of_one_kernel else "nightly")
    if is_quick or not IS_INTERPRETED:
        item.add_marker(_MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if item.get_closest_marker(_MARKER) is None]
    if ON_CPU and others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker(_MARKER)]


def compute_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter compute each row of a matrix product in the same order, as matrix
    instructions do; in numpy's matmul a row depends on its place among the others."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, left: Any, right: Any, acc: Any, *_options: Any) -> Any:
        total = acc.data.copy()
        for k in range(left.data.shape[1]):
            total += left.data[:, k : k + 1] * right.data[k]
        return TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@functools.cache
def _mend_triton() -> None:
    import triton

    if triton.__version__.startswith("3.6."):
        _mend_loops()
    _keep_language_patched()


def _mend_loops() -> None:
    """Triton 3.6 makes bounds of loops Python's in a way that numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _keep_language_patched() -> None:
    """Makes Triton's language Python's once for each function: the interpreter does so at every
    call of one and undoes it behind the kernel, a third of its time. Nothing is compiled here."""
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set[Callable[..., Any]]()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in patched:
            patch_language(function)
            patched.add(function)
        return interpreter._LangPatchScope()  # of no changes, so that there are none to undo

    interpreter._patch_lang = patch_once
