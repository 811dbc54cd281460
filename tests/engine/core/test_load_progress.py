"""Progress of loading: phases, fractions and bytes of weights, as they are told."""

from pathlib import Path
from typing import Any

from baton.engine.core.engine_core import EngineCore
from baton.models import locate
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
