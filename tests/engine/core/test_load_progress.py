"""Progress of loading: phases, fractions and bytes of weights, as they are told."""

import os
import shutil
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.engine_core import EngineCore
from baton.models import locate
from baton.models.digests import digest_of
from tests.support.engine.engines import config_of

TINY = locate("tiny")


def test_load_progress_never_falls_nor_repeats() -> None:
    told: list[tuple[str, float]] = []
    constructed_in: list[str] = []

    class NotedCore(EngineCore):
        """Notes the phase in which it is constructed, and warms up."""

        def __init__(self, *parts: Any) -> None:
            constructed_in.append(told[-1][0])
            super().__init__(*parts)

    NotedCore.from_pretrained(
        TINY, config_of(), on_progress=lambda phase, fraction: told.append((phase, fraction))
    )
    phases, fractions = zip(*told, strict=True)
    assert list(fractions) == sorted(fractions)
    assert len(set(phases)) == len(phases) > 4
    assert constructed_in == ["warming up"]
    assert told[-2][1] < told[-1][1] == 1.0


def test_load_tells_bytes_of_weights_as_it_reads_them() -> None:
    phases: list[str] = []
    told: list[tuple[str, int, int]] = []
    EngineCore.from_pretrained(
        TINY,
        config_of(),
        on_progress=lambda phase, _fraction: phases.append(phase),
        on_loaded_bytes=lambda loaded, whole: told.append((phases[-1], loaded, whole)),
    )
    size = (Path(TINY) / "model.safetensors").stat().st_size
    assert {(phase, whole) for phase, _, whole in told} == {("loading weights", size)}
    loaded = [num_bytes for _, num_bytes, _ in told]
    assert loaded == sorted(loaded)
    assert (loaded[0], loaded[-1]) == (0, size)
    assert len(set(loaded)) > 4


def test_load_reads_weights_while_their_digest_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a large file is kept: here in a pipe, which brings it once all are loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = folder / "model.safetensors"
    save_file({**load_file(file), "unused": torch.zeros(2**24)}, file, {"format": "pt"})
    digest = digest_of(file).hex()
    (kept,) = (tmp_path / "cache/baton/digests").iterdir()
    kept.unlink()
    os.mkfifo(kept)
    loaded, all_loaded = list[EngineCore](), Event()

    def tell(num_bytes: int, num_all: int) -> None:
        if num_bytes == num_all:
            all_loaded.set()

    def load() -> None:
        loaded.append(EngineCore.from_pretrained(str(folder), config_of(), on_loaded_bytes=tell))

    thread = Thread(target=load)
    thread.start()
    try:
        assert all_loaded.wait(20.0)
        assert not loaded
    finally:
        pipe = os.open(kept, os.O_RDWR)
        os.write(pipe, digest.encode())
        os.close(pipe)
        thread.join(20.0)
    kept.unlink()
    again = EngineCore.from_pretrained(str(folder), config_of())
    assert loaded[0].facts.info.content == again.facts.info.content
