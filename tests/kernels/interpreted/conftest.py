"""These modules run in a process of their own, which `test_interpreted.py` starts: a process either
interprets kernels or compiles them, from the moment that Triton is imported."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # Infinities are as good as any number on a GPU, and numpy warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
