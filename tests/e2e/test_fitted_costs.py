"""In a real cluster the router learns what prompts take, and what it explains uses that."""

import random
import secrets
import statistics

import grpc
import pytest

from baton import Client, SamplingParams
from baton.v1 import prefill_pb2
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton_router.routing.fleet.cost_rates import PRIOR

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]

LENGTHS = [20, 60, 130, 300, 700, 1500]
NUM_ROUNDS = 16
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def prompt_of(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 3000) for _ in range(length)]


def done_after(stub: PrefillStub, prompt: list[int]) -> float:
    """Has the worker compute a prompt; its busy seconds since its start."""
    request = prefill_pb2.PrefillRequest(
        request_id=secrets.token_hex(8),
        lease_id=secrets.token_bytes(16),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
    )
    (result,) = (r.result for r in stub.Prefill(request, timeout=60) if r.HasField("result"))
    return result.work_done.busy.ToNanoseconds() / 1e9


def predicted(client: Client, prompt: list[int]) -> float:
    candidates = client.explain(prompt, SHORT).placement.candidates
    (terms,) = (c.terms for c in candidates if c.role == "prefill")
    return terms["uncached"]


def test_predicted_prefill_seconds_match_reported_seconds(cluster):
    """The medians over rounds that learn and predict in turn, for the machine may be slower in one
    than in another."""
    learned: dict[int, list[float]] = {length: [] for length in LENGTHS}
    assumed: dict[int, list[float]] = {length: [] for length in LENGTHS}
    with (
        Client(cluster.address, admin_address=cluster.admin_address) as client,
        grpc.insecure_channel(cluster.process("prefill-0").endpoint) as channel,
    ):
        stub = PrefillStub(channel)
        for number in range(NUM_ROUNDS):
            for length in LENGTHS:
                prompt = prompt_of(length, seed=100 * number + 2 * length)
                expected = predicted(client, prompt)
                before = done_after(stub, prompt_of(2, seed=number))
                took = done_after(stub, prompt) - before
                if number >= NUM_ROUNDS // 2:
                    learned[length].append(expected / took)
                    assumed[length].append(PRIOR.prefill_seconds(length, 0) / took)
                client.generate(prompt_of(length, 100 * number + 2 * length + 1), SHORT).text()
    ratios = [statistics.median(r) for r in learned.values()]
    print("predicted / reported:", dict(zip(LENGTHS, ratios, strict=True)))
    print("as assumed at first:", {n: statistics.median(r) for n, r in assumed.items()})
    assert all(0.5 < ratio < 2.0 for ratio in ratios), ratios


def test_predicted_handoff_seconds_match_reported_seconds(cluster):
    with (
        Client(cluster.address, admin_address=cluster.admin_address) as client,
    ):
        exposed = []
        for i in range(20):
            generation = client.generate(prompt_of(100 + i, seed=i), SHORT)
            generation.text()
            exposed.append(generation.finished.timings.exposed_transfer)
        candidates = client.explain(prompt_of(100, seed=99), SHORT).placement.candidates
        (terms,) = (c.terms for c in candidates if c.role == "decode")
        ratio = (terms["handoff"] + terms["transfer"]) / statistics.median(exposed)
        print("predicted / reported handoff:", ratio)
        assert 0.4 < ratio < 2.5
