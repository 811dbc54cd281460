"""Devices of a local cluster: GPUs by round robin, and shares of what several workers have."""

import os
from typing import Any

import pytest

from baton.cli.local.devices import on_devices

CORES = len(os.sched_getaffinity(0))


def placed(workers: list[dict[str, Any]], num_gpus: int) -> list[tuple[Any, Any]]:
    found = on_devices(workers, lambda: num_gpus)
    return [(each.get("device"), each.get("gpu_memory_utilization")) for each in found]


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "expected"),
    [
        (2, 4, [("cuda:0", None), ("cuda:1", None)]),
        (3, 2, [("cuda:0", 0.45), ("cuda:1", None), ("cuda:0", 0.45)]),
        (3, 1, [("cuda:0", 0.3)] * 3),
        (2, 0, [(None, None)] * 2),
    ],
)
def test_workers_get_gpus_by_round_robin_and_equal_shares(
    num_workers: int, num_gpus: int, expected: list[tuple[Any, Any]]
) -> None:
    assert placed([{} for _ in range(num_workers)], num_gpus) == expected


def test_workers_keep_the_device_and_share_they_set() -> None:
    workers = [
        {"device": "cuda:1"},
        {"device": "cuda"},
        {"device": "cpu"},
        {"device": "auto", "gpu_memory_utilization": 0.2},
    ]
    expected = [("cuda:1", 0.45), ("cuda:0", None), ("cpu", None), ("cuda:1", 0.2)]
    assert placed(workers, 2) == expected


def test_workers_inherit_device_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEVICE", "cuda:3")
    monkeypatch.setenv("BATON_GPU_MEMORY_UTILIZATION", "0.3")
    assert placed([{}, {}], 4) == [(None, None)] * 2


def test_gpus_are_counted_only_for_workers_without_device() -> None:
    def count() -> int:
        raise AssertionError("counted")

    found = on_devices([{"device": "cpu"}, {"device": "cpu"}], count)
    assert [each["num_threads"] for each in found] == [max(1, CORES // 2)] * 2
