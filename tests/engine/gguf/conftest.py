"""A cache of descriptions of its own for every test."""

from pathlib import Path

import pytest

from tests.support.gguf.caches import own_cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path)))
