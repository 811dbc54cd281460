"""These modules run in a process of their own, which `test_interpreted.py` starts: a process either
interprets kernels or compiles them, from the moment that Triton is imported."""

import pytest

from tests.support.kernels.interpreter import IS_INTERPRETED, configure

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    configure(config)
