"""Triton's interpreter, set up for tests. Knows nothing of what is tested."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import triton

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def configure(config: pytest.Config) -> None:
    # Infinities are as good as any number on a GPU, and numpy warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    if not IS_INTERPRETED:
        return
    if triton.__version__.startswith("3.6."):
        _mend_loops()
    _keep_language_patched()


def _mend_loops() -> None:
    """Triton 3.6 makes bounds of loops Python's in a way that numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _keep_language_patched() -> None:
    """Makes Triton's language Python's once for each function: the interpreter does so at every
    call of one and undoes it behind the kernel, a third of its time. Nothing is compiled here."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[Callable[..., Any]]()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in patched:
            patch(function)
            patched.add(function)
        return interpreter._LangPatchScope()  # of no changes, so that there are none to undo

    interpreter._patch_lang = patch_once
