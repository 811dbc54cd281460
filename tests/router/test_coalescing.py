"""Tokens that come fast go out in few messages, and are the same."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InternalError
from baton.serving.coalescer import Coalescer
from baton.v1 import inference_pb2 as pb
from baton_router.lifecycle.client_wire import coalesced
from tests.support.router.scripted import (
    READY,
    Cue,
    Forever,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    prefill,
    tokens,
)


async def test_coalescer_sends_simultaneous_tokens_together():
    decoder = decode(READY, *(tokens(i, i) for i in range(1, 5)), finished())
    async with fleet_of(prefill(first(), Forever()), decoder) as fleet:
        chunks, ids = 0, []
        async for response in lifecycle_of(fleet, coalescer=Coalescer(0.05)).run():
            if response.HasField("tokens"):
                chunks += 1
                ids += response.tokens.token_ids
    assert ids == letter_ids()
    assert chunks <= 3, "the first token, perhaps one alone, and the rest"


async def test_coalescer_sends_each_message_alone_without_window():
    shown, sizes = Cue(), []
    decoder = decode(READY, shown, *(tokens(i, i) for i in range(1, 5)), finished())
    async with fleet_of(prefill(first(), Forever()), decoder) as fleet:
        async for response in lifecycle_of(fleet, coalescer=Coalescer(0)).run():
            if response.HasField("tokens"):
                sizes.append(len(response.tokens.token_ids))
                shown.event.set()  # tokens that overtake the first one wait for it
    assert sizes == [1] * 5


async def test_coalescer_sends_tokens_gathered_before_failure():
    """What was booked counts as shown: were it not sent, it would be lost."""
    shown = Cue()
    dying = decode(READY, shown, tokens(1, 1), tokens(2, 2), InternalError("it broke"))
    heir = decode(READY, tokens(3, 3), tokens(4, 4), finished(), name="d1")
    ids: list[int] = []
    async with fleet_of(prefill(first(), Forever()), dying, heir) as fleet:
        async for response in lifecycle_of(fleet, coalescer=Coalescer(0.05)).run():
            ids += response.tokens.token_ids
            if ids:  # without the first token, others would wait for it
                shown.event.set()
    assert ids == letter_ids()


async def test_coalescer_never_delays_slow_stream(monkeypatch):
    moment = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    coalescer = Coalescer(0.001)
    for _ in range(5):
        await coalescer.acquire()
        moment += 0.002
    assert not waits
    moment -= 0.0015
    await coalescer.acquire()
    assert waits == [pytest.approx(0.0005)]


_EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 3),
        st.sampled_from(["", "ends", "rest"]),
        st.sampled_from(pb.FinishReason.values()),
    ),
    max_size=30,
)


@given(_EVENTS)
def test_coalescing_changes_only_number_of_messages(events):
    """`events`: sequence, number of tokens, whether the sequence ends there, and with held-back
    text after its last token, and the reason for which it does."""
    responses, position, ended, rests = [], [0, 0, 0], set(), []
    for index, count, ends, reason in events:
        if index in ended:
            continue
        chunk = pb.TokenChunk(
            sequence_index=index,
            position=position[index],
            token_ids=range(position[index], position[index] + count),
            text=f"<{position[index]}>",
            logprobs=[-float(i) for i in range(count)],
            top_logprobs=[pb.TopLogprobs(token_ids=[i]) for i in range(count)],
            finish_reason=reason if ends else pb.FINISH_REASON_UNSPECIFIED,
        )
        position[index] += count
        responses.append(pb.GenerateResponse(tokens=chunk))
        if ends == "rest":
            rests.append(pb.GenerateResponse(tokens=pb.TokenChunk(sequence_index=index, text="!")))
            responses.append(rests[-1])
        if ends:
            ended.add(index)
            responses.append(pb.GenerateResponse(finished=pb.Finished(sequence_index=index)))
    before = _streams(responses)
    fewer = list(coalesced(responses))
    assert _streams(fewer) == before
    assert [r for r in fewer if r.HasField("tokens") and not r.tokens.token_ids] == rests
    kinds = [r.WhichOneof("event") for r in fewer]
    assert kinds.count("tokens") <= 3 * (1 + kinds.count("finished")) + len(rests)


def _streams(responses: list[pb.GenerateResponse]) -> list[tuple[object, ...]]:
    """What each sequence's reader gets: positions in order, text, and nothing behind the end."""
    streams = []
    for index in range(3):
        token_ids: list[int] = []
        text, logprobs, tops, has_ended = "", [], [], False
        reason = pb.FINISH_REASON_UNSPECIFIED
        for response in responses:
            if response.HasField("finished"):
                has_ended |= response.finished.sequence_index == index
            elif response.tokens.sequence_index == index:
                chunk = response.tokens
                assert not has_ended
                if chunk.token_ids:
                    assert chunk.position == len(token_ids)
                    assert reason == pb.FINISH_REASON_UNSPECIFIED
                    reason = chunk.finish_reason
                token_ids += chunk.token_ids
                text += chunk.text
                logprobs += chunk.logprobs
                tops += [list(t.token_ids) for t in chunk.top_logprobs]
        streams.append((token_ids, text, logprobs, tops, reason, has_ended))
    return streams
