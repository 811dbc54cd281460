"""Metrics of a worker: while it loads, as it works, and in one role after the other."""

import asyncio
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from baton.models import locate
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb
from baton.worker.metrics import RoleTotals
from baton.worker.process import assemble
from baton.worker.roles import settings_class
from baton.worker.worker import Worker
from tests.support.worker.crew import crew_of
from tests.support.worker.pair import COMMON, TIMEOUT, pair_of
from tests.support.worker.reference import prompt_of

TINY = locate("tiny")
STATES = ("held", "cached", "free")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def told(worker: Worker) -> Samples:
    """By name and labels. Not what was told a moment ago: that is for those who ask often."""
    worker.server.exposition._rendered.clear()
    text, _ = worker.server.exposition.render("application/openmetrics-text; version=1.0.0")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: Any) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_role_totals_keep_counts_of_each_role():
    totals = RoleTotals()
    totals.add("prefill", {"steps": {(): 5}, "tokens": {("prompt",): 50, ("decode",): 0}})
    totals.add("prefill", {"steps": {(): 6}, "tokens": {("prompt",): 60, ("decode",): 1}})
    totals.add("decode", {"steps": {(): 10}, "tokens": {("prompt",): 60, ("decode",): 8}})
    totals.add("prefill", {"steps": {(): 11}, "tokens": {("prompt",): 65, ("decode",): 8}})
    assert totals.of("steps") == {("prefill",): 7, ("decode",): 4}
    assert totals.of("tokens") == {
        ("prefill", "prompt"): 65,
        ("prefill", "decode"): 1,
        ("decode", "prompt"): 0,
        ("decode", "decode"): 7,
    }


def test_role_totals_are_empty_when_nothing_was_counted():
    assert RoleTotals().of("steps") == {}


async def test_loading_worker_reports_only_its_readiness():
    samples = told(assemble("decode", settings_class()(**COMMON)))
    assert of(samples, "baton_worker_ready", role="decode") == 0
    assert not any(name.startswith(("baton_kv_blocks", "baton_steps")) for name, _ in samples)


async def test_worker_totals_stay_with_their_role(checkpoint):
    prompt = prompt_of(40)
    async with crew_of(checkpoint("llama"), "prefill") as crew:
        (member,) = crew.members
        await member.first_token(prompt)
        await member.first_token(prompt)
        before = told(member.worker)
        assert of(before, "baton_prefix_hit_tokens_total", role="prefill", source="prefill_local")
        assert of(before, "baton_prefix_lookup_tokens_total", role="prefill") == 80
        assert of(before, "baton_step_tokens_total", role="prefill", kind="prompt") >= 40
        await member.set_role(pb.WORKER_ROLE_DECODE)
        await member.answer(prompt, GREEDY)
        after = told(member.worker)
        for name in ("baton_steps_total", "baton_prefix_lookup_tokens_total"):
            assert of(after, name, role="prefill") == of(before, name, role="prefill")
        assert of(after, "baton_prefix_lookup_tokens_total", role="decode") == 40
        assert of(after, "baton_prefix_hit_tokens_total", role="decode", source="decode_local") > 0
        assert of(after, "baton_step_tokens_total", role="decode", kind="decode") >= 11
        assert of(after, "baton_worker_ready", role="decode") == 1
        assert ("baton_worker_ready", (("role", "prefill"),)) not in after
        spent = [
            of(after, "baton_step_seconds_total", role="decode", phase=phase)
            for phase in ("schedule", "forward", "sample")
        ]
        assert min(spent) > 0


async def test_kv_block_metrics_count_held_cached_free_and_host(checkpoint):
    async with crew_of(checkpoint("llama"), "decode", swap_bytes=2**20) as crew:
        (member,) = crew.members
        await member.answer(prompt_of(40), GREEDY)
        await crew.nothing_held()
        samples = told(member.worker)
        states = {s: of(samples, "baton_kv_blocks", role="decode", state=s) for s in STATES}
        assert sum(states.values()) == COMMON["num_blocks"]
        assert states["held"] == 0
        assert states["cached"] == 3
        assert of(samples, "baton_reserved_kv_blocks", role="decode") == 0
        assert of(samples, "baton_host_kv_blocks", role="decode", state="held") == 0
        assert of(samples, "baton_host_kv_blocks", role="decode", state="free") > 0
        assert of(samples, "baton_swapped_kv_blocks_total", role="decode", direction="out") == 0


async def test_reserved_blocks_are_reported_during_a_long_prefill():
    async with pair_of(TINY, num_blocks=80, max_num_batched_tokens=16) as pair:
        call = pair.to_prefill.Prefill(pair.prefill_request([5] * 1000, GREEDY), timeout=TIMEOUT)
        metric, reserved = 0.0, 0
        assert (await call.read()).HasField("admitted")
        while not (metric and reserved):
            samples = told(pair.prefill)
            metric = metric or of(samples, "baton_reserved_kv_blocks", role="prefill")
            used = await pair.prefill_admin.GetMemory(admin.GetMemoryRequest(), timeout=TIMEOUT)
            reserved = reserved or used.workers[0].num_reserved_tokens
            assert pair.prefill.model.engine.reading.stats.num_kept == 0, "the prefill has ended"
        call.cancel()
        assert 0 < metric <= 1000 / 16
        assert 0 < reserved <= 1000
        assert reserved % 16 == 0
        await pair.nothing_held()
        assert of(told(pair.prefill), "baton_reserved_kv_blocks", role="prefill") == 0


async def test_preemption_metric_counts_recomputed_sequences(checkpoint):
    settings = {"num_blocks": 8, "preemption": "recompute", "max_num_batched_tokens": 64}
    async with crew_of(checkpoint("llama"), "decode", **settings) as crew:
        (member,) = crew.members
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        await asyncio.gather(*(member.answer(prompt_of(40, seed=i), params) for i in range(2)))
        samples = told(member.worker)
        stats = member.model.engine.reading.stats
        by_mode = [
            of(samples, "baton_preemptions_total", role="decode", mode=mode)
            for mode in ("recompute", "swap", "return")
        ]
        assert by_mode == [stats.num_recomputes, 0, 0]
        assert stats.num_recomputes == stats.num_preemptions > 0
