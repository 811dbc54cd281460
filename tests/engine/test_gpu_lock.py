"""Lock of a GPU: workers that share it measure and take its memory one after the other."""

import threading
from pathlib import Path

import torch

from baton.engine.memory.gpu_lock import file_lock, gpu_lock


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


def test_gpu_lock_is_free_on_cpu() -> None:
    with gpu_lock(torch.device("cpu")), gpu_lock(torch.device("cpu")):
        pass
