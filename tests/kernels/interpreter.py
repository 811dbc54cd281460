"""Triton's interpreter, set up for tests. Knows nothing of what is tested."""

import os
from typing import Any

import pytest
import triton

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def configure(config: pytest.Config) -> None:
    # Infinities are as good as any number on a GPU, and numpy warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    if IS_INTERPRETED and triton.__version__.startswith("3.6."):
        _mend_loops()


def _mend_loops() -> None:
    """Triton 3.6 makes bounds of loops Python's in a way that numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend
