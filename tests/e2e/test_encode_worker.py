"""Encode worker process that is killed before, during and after it hands an output over."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.client.types import Load
from baton.engine import LLM, EngineConfig, MultimodalPrompt
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, encode_pb2, prefill_pb2
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.encode_pb2_grpc import EncodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from tests.support.cluster.named_clusters import Traced
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.waiting import until_observed
from tests.support.worker.crew import tokens_of
from tests.support.worker.pair import rest_of

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
TIMEOUT = 60.0
MOMENTS = ("before", "computing", "transferring", "after")

_seeds = itertools.count(800)  # of images that no other test shows


class Question:
    """Prompt about an image that no worker has cached, with transformers' answer."""

    def __init__(self, path: str, engine: LLM) -> None:
        seed = next(_seeds)
        text, images = f"{words(40, seed)} {IMAGE_TOKEN} {words(9, -seed)}", (image(seed),)
        self.name = f"r{seed}"
        self.lease_id = seed.to_bytes(16, "big")
        self.prompt: MultimodalPrompt = engine.prompt_with_images(text, images)
        self.expected = list(greedy(path, text, images, NUM_TOKENS))

    def to_encode(self, claimant: str) -> encode_pb2.EncodeRequest:
        (wanted,) = self.prompt.encoder_inputs
        return encode_pb2.EncodeRequest(
            request_id=self.name,
            lease_id=self.lease_id,
            encoder_input=encoder_input_to_message(wanted),
            claimant=claimant,
        )

    def fields(self, source: prefill_pb2.EncoderSource) -> dict[str, Any]:
        """The fields that requests to both roles have in common."""
        return {
            "request_id": self.name,
            "token_ids": self.prompt.token_ids,
            "num_prompt_tokens": len(self.prompt.token_ids),
            "sampling": params_to_message(GREEDY),
            "encoder_inputs": map(encoder_input_to_message, self.prompt.encoder_inputs),
            "encoder_sources": [source],
        }


class Workers:
    """The workers of a cluster, called in the router's place."""

    def __init__(self, cluster: LocalCluster, stack: AsyncExitStack) -> None:
        self.cluster = cluster
        self._stack = stack

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(endpoint)
        self._stack.push_async_callback(channel.close)
        return channel

    def encode(self, question: Question, claimant: str) -> Any:
        stub: Any = EncodeStub(self.channel(self.cluster.process("encode-0").endpoint))
        return stub.Encode(question.to_encode(claimant), timeout=TIMEOUT)

    def source(self, question: Question) -> prefill_pb2.EncoderSource:
        with Client(self.cluster.address, admin_address=self.cluster.admin_address) as client:
            (encode,) = (w for w in client.list_workers() if w.id == "encode-0")
        return prefill_pb2.EncoderSource(
            worker=encode.id,
            endpoint=encode.endpoint,
            epoch=encode.epoch,
            lease_id=question.lease_id,
        )

    async def answer(
        self, role: str, question: Question, source: prefill_pb2.EncoderSource
    ) -> list[int]:
        """Tokens that a worker of `role` answers: a prefill worker the first one."""
        channel = self.channel(self.cluster.process(f"{role}-0").endpoint)
        fields = question.fields(source)
        if role == "decode":
            decoding: Any = DecodeStub(channel)
            request = decode_pb2.DecodeGenerateRequest(**fields)
            return tokens_of(await rest_of(decoding.Generate(request, timeout=TIMEOUT)))
        prefilling: Any = PrefillStub(channel)
        wanted = prefill_pb2.PrefillRequest(lease_id=question.lease_id, **fields)
        events = await rest_of(prefilling.Prefill(wanted, timeout=TIMEOUT))
        return [token.token_id for e in events for token in e.result.first_tokens]

    def load(self, name: str) -> Load:
        return load_of(self.cluster.process(name).admin_endpoint)

    async def until_text_is_computed(self, name: str, question: Question, before: Load) -> None:
        """Waits until a worker has computed the tokens before the image."""
        (wanted,) = question.prompt.encoder_inputs
        num_tokens = before.num_computed_tokens + wanted.start
        await until_observed(lambda: self.load(name).num_computed_tokens >= num_tokens)


@pytest.fixture(scope="module")
def path(pictured_shape: Traced) -> str:
    return pictured_shape.cluster.model


@pytest.fixture(scope="module")
def engine(path: str) -> LLM:
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=16)
    return LLM.from_pretrained(path, config)


@pytest.fixture
async def workers(pictured: LocalCluster) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(pictured, stack)


@pytest.mark.parametrize(
    ("role", "moment"),
    [  # each moment with one of both roles; with the other one nightly
        pytest.param(role, moment, marks=() if (i + j) % 2 else pytest.mark.nightly)
        for i, role in enumerate(("prefill", "decode"))
        for j, moment in enumerate(MOMENTS)
    ],
)
async def test_answer_survives_encode_worker_killed(workers, path, engine, role, moment):
    cluster, question = workers.cluster, Question(path, engine)
    source, name = workers.source(question), f"{role}-0"
    before = workers.load(name)
    call = None
    if moment == "before":
        cluster.kill("encode-0")
    if moment == "computing":
        cluster.kill("encode-0", signal.SIGSTOP)
    if moment != "before":
        call = workers.encode(question, name)
    if moment in ("transferring", "after"):
        assert [(await call.read()).WhichOneof("event") for _ in range(2)] == [
            "admitted",
            "encoded",
        ]
    if moment == "transferring":
        cluster.kill("encode-0", signal.SIGSTOP)
    answering = asyncio.create_task(workers.answer(role, question, source))
    if moment == "after":
        assert (await call.read()).HasField("released")
    elif moment != "before":
        await workers.until_text_is_computed(name, question, before)
        assert not answering.done()
    cluster.kill("encode-0")
    expected = question.expected[:1] if role == "prefill" else question.expected
    assert await answering == expected
    after = workers.load(name)
    assert after.num_transfers - before.num_transfers == (moment == "after")
    assert after.num_failed_transfers - before.num_failed_transfers == (moment != "after")
    await until_nothing_is_held(cluster)


async def test_encode_worker_holds_nothing_after_claimant_is_killed(workers, path, engine):
    cluster, question = workers.cluster, Question(path, engine)
    source = workers.source(question)
    before = workers.load("prefill-0")
    answering = asyncio.create_task(workers.answer("prefill", question, source))
    await workers.until_text_is_computed("prefill-0", question, before)
    cluster.kill("prefill-0")
    # Answered if its fetch was given up before: the lease had not opened.
    await asyncio.gather(answering, return_exceptions=True)
    call = workers.encode(question, "prefill-0")
    assert (await call.read()).HasField("admitted")
    assert (await call.read()).HasField("encoded")
    assert workers.load("encode-0").num_leases == 1
    call.cancel()  # as the router does when it has lost the claimant
    await until_nothing_is_held(cluster)
    await asyncio.to_thread(cluster.restart, "prefill-0")
    assert await workers.answer("prefill", question, source) == question.expected[:1]
