"""Order of a step's work on a device that runs behind the host: what is announced is written, and
tokens do not wait for the step behind theirs. The device computes only when the host waits."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from baton.cluster.prefix import hash_chain
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.cache import kv_pool
from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import KvSource, Purpose
from baton.errors import BatonError
from baton.sampling import SamplingParams
from baton_kernels.block_copy import copy_blocks
from tests.support.engine.deferred_stream import DeferredStream
from tests.support.engine.engines import assert_idle, drain, load, load_parts, output_of, request
from tests.support.engine.kinds import KINDS, transcript
from tests.support.engine.prompts import random_prompt

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def deferred(stream: DeferredStream, path: str, **changes: object) -> LLM:
    """An engine that computes on the stream."""
    return LLM(EngineCore(*load_parts(path, **changes), stream))


class Faulty:
    """Part of an engine of which one method calls `fault` first."""

    def __init__(self, part: Any, method: str, fault: Callable[[], None]) -> None:
        self._part, self._method, self._fault = part, method, fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        return self._faulty(found) if name == self._method else found

    def _faulty(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any) -> Any:
            self._fault()
            return call(*arguments)

        return faulty


def written(engine: LLM, block_ids: Sequence[int]) -> list[bool]:
    content = engine.core.cache.pools[0].content
    return [bool(content[block_id].any()) for block_id in block_ids]


def tables_of(engine: LLM, request_id: str) -> tuple[int, ...]:
    (sequence,) = engine.core.scheduler._states.requests[request_id].sequences
    return tuple(sequence.block_ids[0])


SMALL_STEPS = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}


def test_prefill_announces_only_blocks_that_are_written(checkpoints):
    """Also the blocks of chunks that choose no token."""
    engine = deferred(DeferredStream(), checkpoints["llama"], **SMALL_STEPS)
    engine.core.add(request("a", random_prompt(70), GREEDY, purpose=Purpose.PREFILL))
    num_computed = []
    while engine.core.has_work:
        for update in engine.core.step().updates:
            num_computed.append(update.num_computed_tokens)
            assert all(written(engine, update.block_ids[0][: num_computed[-1] // 4]))
            if update.finish_reason is not None:
                engine.core.scheduler.release("a")
    assert num_computed == [16, 32, 48, 64, 70]


def test_step_lends_only_blocks_that_are_written(checkpoints):
    engine = deferred(DeferredStream(), checkpoints["llama"], **SMALL_STEPS)
    prompt = random_prompt(70)
    hashes = hash_chain(engine.core.facts.info.namespace.root(), prompt, 4)
    engine.core.add(request("a", prompt, GREEDY))
    most = 0
    while engine.core.has_work:
        engine.core.step()
        (found,) = engine.core.scheduler.pin("lease", hashes)
        assert all(written(engine, found))
        engine.core.scheduler.unpin("lease")
        most = max(most, len(found))
    assert most >= 16


def test_external_blocks_are_announced_after_steps_that_use_them(checkpoints):
    """Those of sequences that left while a step that writes to their blocks was launched."""
    few = {"block_size": 4, "num_blocks": 16, "max_num_seqs": 4}
    engine = deferred(DeferredStream(), checkpoints["llama"], **few, prefix_caching=False)
    for name in ("a", "b"):
        engine.core.add(request(name, random_prompt(18, seed=ord(name)), GREEDY))
    for _ in range(3):
        engine.core.step()
    assert engine.core.is_ahead
    held = {block for name in ("a", "b") for block in tables_of(engine, name)}
    engine.core.scheduler.abort("a", "b")
    engine.core.add(request("d", random_prompt(48), GREEDY, kv_source=KvSource.EXTERNAL))
    (allocation,) = next(filter(None, (engine.core.step().external for _ in range(4))))
    (targets,) = allocation.block_ids
    assert held & set(targets)
    engine.core.cache.pools[0].content[list(targets)] = 77
    engine.core.add(request("c", random_prompt(3), GREEDY))
    for _ in range(4):
        engine.core.step()
    assert engine.core.cache.pools[0].content[list(targets)].eq(77).all()
    engine.core.scheduler.abort("c", "d")
    drain(engine)
    assert_idle(engine)


def test_tokens_do_not_wait_for_the_step_behind(checkpoints):
    stream = DeferredStream()
    engine = deferred(stream, checkpoints["llama"])
    for i in range(3):
        engine.core.add(request(str(i), random_prompt(5 + i, seed=i), GREEDY))
    num_behind = 0
    while engine.core.has_work:
        engine.core.step()
        is_behind = engine.core.is_ahead
        assert stream.num_launched - stream.num_done == is_behind
        num_behind += is_behind
    assert num_behind >= 10


ROOM = [{}, {"num_blocks": 64, "preemption": "swap", "swap_bytes": 2**20}]


@pytest.mark.parametrize("changes", ROOM, ids=["roomy", "swapping"])
def test_deferred_device_changes_no_token(checkpoints, rng, changes):
    path = checkpoints["llama"]
    settings = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24, **changes}
    prompts = {kind: random_prompt(3 + 7 * i % 40, seed=i) for i, kind in enumerate(KINDS)}

    def outputs(engine: LLM) -> dict[str, dict[int, tuple[int, ...]]]:
        for kind, prompt in prompts.items():
            engine.core.add(request(kind, prompt, KINDS[kind]))
        found = {kind: output_of(updates) for kind, updates in drain(engine).items()}
        assert_idle(engine)
        return found

    expected = outputs(load(path, **settings))
    for dice in (None, rng):
        stream = DeferredStream(dice)
        assert outputs(deferred(stream, path, **settings)) == expected
        assert stream.num_done == stream.num_launched


def test_block_copies_read_their_pairs_on_the_device(monkeypatch):
    """Host memory would be free again before the kernel reads it."""
    copied, gpu = [], torch.device("cuda", 0)
    monkeypatch.setattr("baton_kernels.block_copy.copy_blocks", lambda *args: copied.append(args))
    with FakeTensorMode():
        pool, uploaded = (torch.empty(6, n, dtype=torch.uint8, device=gpu) for n in (32, 2))
        monkeypatch.setattr(kv_pool, "uploader", lambda device: {gpu: lambda _: uploaded}[device])
        assert kv_pool._copy_on_gpu(pool, pool, [1, 2], [3, 4])
    assert copied[0][2] is uploaded


def test_copy_blocks_refuses_pairs_in_host_memory():
    with FakeTensorMode():
        pool = torch.empty(4, 32, dtype=torch.uint8, device="cuda")
        pairs = torch.empty(1, 2, dtype=torch.int64)
        with pytest.raises(ValueError, match="may be reused before the kernel reads"):
            copy_blocks(pool, pool, pairs)


LACKS = {
    "forward": (0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")),
    "forward, swapping": (1, torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB")),
    "prepare": (0, RuntimeError("Triton Error [CUDA]: out of memory, 20 GiB")),
    "prepare, swapping": (1, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED, 20 GiB")),
}


@pytest.mark.parametrize("where", LACKS)
def test_step_without_memory_ends_its_requests_alone(checkpoints, rng, where):
    room, error = LACKS[where]
    changes = ROOM[room]
    settings = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24, **changes}
    asked = [
        request(kind, random_prompt(3 + 7 * i % 40, seed=i), params)
        for i, (kind, params) in enumerate(KINDS.items())
    ]
    engine = load(checkpoints["llama"], **settings)
    for one in asked:
        engine.core.add(one)
    expected = {kind: transcript(updates) for kind, updates in drain(engine).items()}

    num_calls, num_copies = itertools.count(), itertools.count()

    def run_out_of_memory() -> None:
        if next(num_calls) in (3, 7, 8, 20):
            raise error

    def lack_memory_at_first() -> None:
        if next(num_copies) % 2 == 0:
            raise error

    config, loaded = load_parts(checkpoints["llama"], **settings)
    method, _, _ = where.partition(",")
    part = "model" if method == "forward" else "attention"
    faulty = {part: Faulty(getattr(loaded, part), method, run_out_of_memory)}
    engine = LLM(EngineCore(config, replace(loaded, **faulty), DeferredStream(rng)))
    for pools in (engine.core.cache.pools, engine.core.cache.host_pools):
        pools[:] = [Faulty(pool, "copy_blocks", lack_memory_at_first) for pool in pools]
    updates: dict[str, list[SequenceUpdate]] = {}
    failed: dict[str, BatonError] = {}
    for _ in range(2):
        for one in asked if not updates else [one for one in asked if one.request_id in failed]:
            updates[one.request_id] = []
            engine.core.add(one)
        while engine.core.has_work:
            output = engine.core.step()
            failed |= output.failed
            for update in output.updates:
                updates[update.request_id].append(update)
            engine.core.scheduler.check_integrity()
    assert {kind: transcript(of_one) for kind, of_one in updates.items()} == expected
    assert 1 <= len(failed) < len(asked)
    assert "20 GiB" in str(failed.popitem()[1])
    assert_idle(engine)


def test_step_with_another_error_ends_the_engine(checkpoints):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    config, loaded = load_parts(checkpoints["llama"])
    loaded = replace(loaded, attention=Faulty(loaded.attention, "prepare", fail))
    engine = LLM(EngineCore(config, loaded))
    engine.core.add(request("a", random_prompt(5), GREEDY))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.core.step()
