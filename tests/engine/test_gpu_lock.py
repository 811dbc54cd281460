"""Lock of a GPU: workers that share it measure and take its memory one after the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.memory import cache_allocation
from baton.engine.memory.gpu_lock import file_lock


def test_file_lock_excludes_other_holders_until_released(tmp_path: Path) -> None:
    events: list[str] = []

    def second() -> None:
        with file_lock(tmp_path / "gpu.lock"):
            events.append("second")

    thread = threading.Thread(target=second)
    with file_lock(tmp_path / "gpu.lock"):
        thread.start()
        thread.join(0.1)
        events.append("first")
    thread.join(10.0)
    assert events == ["first", "second"]


def test_allocate_measures_and_takes_memory_under_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []

    @contextmanager
    def lock(device: torch.device) -> Iterator[None]:
        events.append(device)
        yield
        events.append("released")

    def step(name: str, result: Any) -> None:
        def record(*_args: object) -> Any:
            events.append(name)
            return result

        monkeypatch.setattr(cache_allocation, name, record)

    class Plan:
        layouts, encoder = (), None

        def pools(self, _counts: list[int], _device: torch.device) -> list[object]:
            events.append("pools")
            return []

        def cache(self, *_args: object) -> str:
            return "cache"

    monkeypatch.setattr(cache_allocation, "gpu_lock", lock)
    step("_measured", None)
    step("bytes_for_pools", 0)
    step("num_blocks", [])
    step("memory_of", 1)
    step("check_holds_longest", None)
    unused: Any = None
    arguments: Any = (EngineConfig(), Plan(), unused, unused)
    device = torch.device("cuda:1")
    assert cache_allocation.allocate(*arguments, device, 64) == "cache"
    assert events[:2] == [device, "_measured"]
    assert events[-2:] == ["pools", "released"]
