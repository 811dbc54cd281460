"""Threads for long texts, and the tenants that share them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from baton.context_length import ContextLength
from baton.fairness.fair_threads import FairThreads
from baton.models import locate
from baton.models.pooling import Pooling
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.call.generate_call import EmbedCall, ScoreCall
from baton_router.text.conversation.in_thread import text_threads
from baton_router.text.intake import Intake
from baton_router.text.model_card import read_model_card
from baton_router.text.pooled_intake import PooledIntake
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.calls import call_of
from tests.support.waiting import settled, until

LONG = "a long text " * 1000
CARD = read_model_card(locate("tiny"))
LONGEST = ContextLength(2**20)

Ask = Callable[[Tenant], Awaitable[object]]


def ways(threads: FairThreads) -> dict[str, Ask]:
    """Returns the ways in which a long text of a tenant is tokenized."""
    card = replace(CARD, max_model_len=2**20)
    intake = Intake(card, RequestLimits(), threads=threads)
    pooling = Pooling(kind="embedding", width=2, normalizes=True)
    pooled = PooledIntake(replace(card, pooling=pooling), RequestLimits(), threads)
    text = call_of(pb.GenerateRequest(text=LONG))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=LONG * 4)])
    embed, score = EmbedCall([LONG]), ScoreCall([(LONG, LONG)])
    return {
        "a text": partial(intake.read, text, LONGEST),
        "a chat": partial(intake.read, call_of(pb.GenerateRequest(chat=chat)), LONGEST),
        "a count": lambda tenant: intake.tokenize(LONG, holder=tenant.name),
        "an embedding": partial(pooled.read_inputs, embed, LONGEST),
        "a score": partial(pooled.read_pairs, score, LONGEST),
    }


@pytest.mark.parametrize("way", list(ways(text_threads())))
async def test_long_texts_of_one_tenant_delay_no_other(way):
    threads, gate = FairThreads(2, 100, "tokenization"), threading.Event()
    ask = ways(threads)[way]
    holding = asyncio.create_task(threads.call("many", gate.wait))
    await settled()
    try:
        of_many = [asyncio.ensure_future(ask(Tenant("many"))) for _ in range(4)]
        await until(lambda: threads.num_waiting == 4)
        assert await ask(Tenant("few"))
        assert not any(task.done() for task in of_many)
    finally:
        gate.set()
    assert await holding
    assert all(await asyncio.gather(*of_many))
    threads.close()


async def test_short_texts_wait_for_no_thread():
    threads, gate = FairThreads(1, 100, "tokenization"), threading.Event()
    holding = asyncio.create_task(threads.call("many", gate.wait))
    await settled()
    try:
        intake = Intake(CARD, RequestLimits(), threads=threads)
        assert (await intake.tokenize("abc", holder="many"))[0]
        assert threads.num_waiting == 0
    finally:
        gate.set()
    await holding
    threads.close()
