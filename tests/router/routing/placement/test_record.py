"""Recorded placements: replayable, and harmless to write."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.prefix import hash_chain
from baton.errors import InvalidArgumentError, NotFoundError
from baton_router.call.request import Demand
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs, Rules
from baton_router.routing.placement.fit import TOO_SMALL
from baton_router.routing.placement.placer import Placer
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_router.routing.placement.record.record_file import RecordFile, RecordLimits
from baton_router.routing.placement.record.record_format import (
    RecordReader,
    decision_line,
    encoders_of,
    header_line,
)
from baton_router.routing.placement.record.recorder import Recorder
from baton_router.routing.placement.record.replay import read_record, replay
from tests.support.router.scripted import FakeFleet
from tests.support.strategies import clusters, clusters_with_images, images, request_ids
from tests.support.waiting import wait_until

TOKENS = tuple(range(1000, 1064))
HASHES = hash_chain(b"root", TOKENS, 16)


pairs = st.frozensets(st.tuples(st.just("prefill-0"), st.sampled_from(["decode-0", "decode-1"])))
questions = st.builds(
    PlacementInputs,
    request_id=request_ids,
    num_tokens=st.integers(0, 64),
    candidates=(clusters(64) | clusters_with_images(64)).map(tuple),
    broken=pairs,
    images=st.just(()) | images(64),
    demand=st.none() | st.builds(Demand, st.integers(0, 64), st.integers(1, 64)),
)
rules = st.builds(Rules, policy=st.sampled_from(POLICY_NAMES))


def by_name(inputs: PlacementInputs) -> PlacementInputs:
    ordered = sorted(inputs.candidates, key=lambda c: c.worker)
    return replace(inputs, candidates=tuple(ordered))


@given(rules, st.lists(questions, max_size=6))
def test_record_round_trips_and_replays_same_decision(used, asked):
    reader, before = RecordReader(), {}
    assert reader.read(header_line(used)) is None
    for inputs in asked:
        decision = Decision(used, inputs, used.decide(inputs))
        line = decision_line(1.5, decision, HASHES, before)
        before = {c.worker: c for c in inputs.candidates}
        recorded = reader.read(line)
        assert recorded is not None
        assert by_name(recorded.inputs) == by_name(inputs)
        assert (recorded.rules, recorded.hashes) == (used, tuple(HASHES))
        (again,) = replay([recorded])
        assert again.is_same
        assert recorded.encoders == encoders_of(decision.placement)
        if decision.placement is not None:
            assert again.decision.placement == decision.placement


CLUSTER = (
    Candidate("holder", "prefill", b"x" * 500, num_cached_tokens=48, num_queued_tokens=10**6),
    Candidate("other", "prefill", b"x" * 500),
    Candidate("d0", "decode", b"x" * 500),
)


def decided(request_id: str, *candidates: Candidate) -> Decision:
    inputs = PlacementInputs(request_id, 64, candidates or CLUSTER)
    return Decision(DEFAULT_RULES, inputs, DEFAULT_RULES.decide(inputs))


def recorder(path: Path, max_bytes: int = 2**20, num_files: int = 3) -> Recorder:
    started = Recorder(
        RecordFile(path, RecordLimits(max_bytes=max_bytes, files=num_files)), DEFAULT_RULES
    )
    started.start()
    return started


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_has_choice_and_time_but_no_token(tmp_path):
    record = recorder(tmp_path / "r")
    record.decided(decided("one"), lambda: HASHES)
    record.ended("one", 7)
    record.stop()
    header, decision, ended = lines_of(tmp_path / "r")
    assert header["rules"] == {
        "policy": "baton",
        "conditional_disaggregation": True,
        "no_handoff": False,
    }
    assert (decision["prefill"], decision["decode"], decision["tokens"]) == ("other", "d0", 64)
    assert (ended["ended"], ended["output_tokens"]) == ("one", 7)
    assert "1001" not in (tmp_path / "r").read_text()
    (read,) = read_record(tmp_path / "r")
    assert read.hashes == tuple(HASHES)


def test_record_writes_only_workers_that_changed(tmp_path):
    record = recorder(tmp_path / "r")
    busier = CLUSTER[1]._replace(num_queued_tokens=9)
    for cluster in (CLUSTER, CLUSTER, (CLUSTER[0], busier, CLUSTER[2]), CLUSTER[1:]):
        record.decided(decided("r", *cluster), list)
    record.stop()
    _, first, second, third, fourth = lines_of(tmp_path / "r")
    assert len(first["workers"]) == 3
    assert "workers" not in second
    assert third["workers"] == {"other": {"num_queued_tokens": 9}}
    assert fourth["gone"] == ["holder"]


def test_record_keeps_sizes_of_workers_and_demand(tmp_path):
    limits = WorkerLimits(2048, 16, 2, 8)
    small = Candidate("small", "decode", b"x" * 500, limits=limits)
    inputs = PlacementInputs("r", 64, (*CLUSTER, small), demand=Demand(64, 8, 2, 2))
    record = recorder(tmp_path / "r")
    record.decided(Decision(DEFAULT_RULES, inputs, DEFAULT_RULES.decide(inputs)), list)
    record.stop()
    (read,) = read_record(tmp_path / "r")
    assert read.inputs == inputs
    assert read.inputs.candidates[-1] == small._replace(excluded=TOO_SMALL)
    (again,) = replay([read])
    assert again.is_same


def test_replay_differs_only_under_another_policy(tmp_path):
    record = recorder(tmp_path / "r")
    for i in range(20):
        record.decided(decided(f"r{i}"), list)
    record.stop()
    recorded = list(read_record(tmp_path / "r"))
    assert all(one.is_same for one in replay(recorded))
    others = list(replay(recorded, "prefix-only"))
    assert {(one.prefill, one.decode, one.is_same) for one in others} == {("holder", "d0", False)}


def test_record_files_are_bounded_and_readable_alone(tmp_path):
    record = recorder(tmp_path / "r", max_bytes=8192, num_files=3)
    for i in range(300):
        record.decided(decided(f"r{i}"), lambda: HASHES)
    record.stop()
    assert record.num_lost == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r", "r.1", "r.2"]
    assert all(file.stat().st_size <= 8192 for file in files)
    names = [one.inputs.request_id for file in reversed(files) for one in read_record(file)]
    assert names == [f"r{i}" for i in range(300 - len(names), 300)]
    assert all(one.is_same for file in files for one in replay(read_record(file)))


def test_record_keeps_earlier_file_beside_new_one(tmp_path):
    for name in ("first", "second"):
        record = recorder(tmp_path / "r")
        record.decided(decided(name), list)
        record.stop()
    assert [one.inputs.request_id for one in read_record(tmp_path / "r")] == ["second"]
    assert [one.inputs.request_id for one in read_record(tmp_path / "r.1")] == ["first"]


def test_recorder_loses_only_lines_when_disk_is_full(tmp_path, caplog):
    """/dev/full has room for nothing. Once the name is another file's, the record goes on."""
    path = tmp_path / "r"
    path.symlink_to("/dev/full")
    record = recorder(path)
    for i in range(10):
        record.decided(decided(f"lost{i}"), list)
    wait_until(lambda: record.num_lost == 10)
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    path.unlink()
    record._resume_at = 0.0
    record.decided(decided("kept"), list)
    record.stop()
    assert [one.inputs.request_id for one in read_record(path)] == ["kept"]


def test_recorder_never_waits_for_slow_disk(tmp_path):
    admission_controller = threading.Event()

    def hashing() -> list[bytes]:
        assert admission_controller.wait(10)
        return []

    record = recorder(tmp_path / "r", max_bytes=2**24)
    for i in range(5000):
        record.decided(decided(f"r{i}"), hashing)
    assert record.num_lost >= 5000 - 4096 - 1
    admission_controller.set()
    record.stop()
    assert len(list(read_record(tmp_path / "r"))) + record.num_lost == 5000


def test_recorder_refuses_unwritable_path_at_start(tmp_path):
    with pytest.raises(InvalidArgumentError, match="no-folder"):
        recorder(tmp_path / "no-folder" / "r")


def test_record_reader_skips_unfinished_last_line(tmp_path):
    record = recorder(tmp_path / "r")
    record.decided(decided("r"), list)
    record.stop()
    whole = (tmp_path / "r").read_bytes()
    start = whole.index(b"\n") + 1
    for size in (start, start + 1, (start + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        (tmp_path / "r").write_bytes(whole[:size])
        assert list(read_record(tmp_path / "r")) == []


@settings(max_examples=50)
@given(st.binary(max_size=60) | st.from_regex(rb"\{.{0,40}\}", fullmatch=True))
def test_record_reader_refuses_foreign_lines(line):
    for before in ([], [header_line(DEFAULT_RULES)]):
        reader = RecordReader()
        for good in before:
            reader.read(good)
        with pytest.raises(InvalidArgumentError):
            reader.read(line)


def test_record_reader_names_other_version_and_missing_file(tmp_path):
    (tmp_path / "r").write_text('{"baton_record": 2, "rules": {}}\n')
    with pytest.raises(InvalidArgumentError, match=r"r:1.*version 2"):
        list(read_record(tmp_path / "r"))
    with pytest.raises(NotFoundError, match="nothing"):
        list(read_record(tmp_path / "nothing"))


def test_placer_counts_entries_dropped_after_stop(tmp_path):
    record = recorder(tmp_path / "r")
    record.stop()
    record.decided(decided("late"), list)
    record.ended("late", 5)
    placer = Placer(FakeFleet([]), recorder=record)  # type: ignore[arg-type]
    assert placer.num_unrecorded == 2
