"""Tokens that come fast go out in few messages, and are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InternalError
from baton.serving.grpc.coalescer import Coalescer
from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.ending import Ending, FinishReason
from baton_router.call.output_delta import OutputDelta
from baton_router.call.tokens import Tokens, TopLogprobs
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.events import ClientEvent, Finished, coalesced
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
    messages_of,
    prefill,
    tokens,
)


async def test_coalescer_sends_simultaneous_tokens_together():
    decoder = decode(READY, *(tokens(i, i) for i in range(1, 5)), finished())
    async with fleet_of(prefill(first(), Forever()), decoder) as fleet:
        chunks, ids = 0, []
        async for response in messages_of(lifecycle_of(fleet, coalescer=Coalescer(0.05))):
            if response.HasField("tokens"):
                chunks += 1
                ids += response.tokens.token_ids
    assert ids == letter_ids()
    assert chunks <= 3, "the first token, perhaps one alone, and the rest"


async def test_coalescer_sends_each_message_alone_without_window():
    shown, sizes = Cue(), []
    decoder = decode(READY, shown, *(tokens(i, i) for i in range(1, 5)), finished())
    async with fleet_of(prefill(first(), Forever()), decoder) as fleet:
        async for response in messages_of(lifecycle_of(fleet, coalescer=Coalescer(0))):
            if response.HasField("tokens"):
                sizes.append(len(response.tokens.token_ids))
                shown.event.set()  # tokens that overtake the first one wait for it
    assert sizes == [1] * 5


async def test_coalescer_sends_tokens_gathered_before_failure():
    """Tokens booked count as shown: were they not sent, they would be lost."""
    shown = Cue()
    dying = decode(READY, shown, tokens(1, 1), tokens(2, 2), InternalError("it broke"))
    heir = decode(READY, tokens(3, 3), tokens(4, 4), finished(), name="d1")
    ids: list[int] = []
    async with fleet_of(prefill(first(), Forever()), dying, heir) as fleet:
        async for response in messages_of(lifecycle_of(fleet, coalescer=Coalescer(0.05))):
            ids += response.tokens.token_ids
            if ids:  # without the first token, others would wait for it
                shown.event.set()
    assert ids == letter_ids()


async def test_coalescer_never_delays_slow_stream():
    moment = 100.0
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    coalescer = Coalescer(0.001, lambda: moment, sleep)
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
        st.sampled_from(FinishReason),
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
        begin = position[index]
        sent = Tokens(
            begin,
            list(range(begin, begin + count)),
            [-float(i) for i in range(count)],
            [TopLogprobs((i,), (-1.0,)) for i in range(count)],
        )
        known = reason if ends else None
        responses.append(OutputDelta(index, sent, f"<{begin}>", known))
        position[index] += count
        if ends == "rest":
            rests.append(OutputDelta(index, Tokens(0, []), "!"))
            responses.append(rests[-1])
        if ends:
            ended.add(index)
            responses.append(Finished(index, Ending(reason), Account(Timings(0.0), 1)))
    before = _streams(responses)
    fewer = list(coalesced(responses))
    assert _streams(fewer) == before
    chunks = [event for event in fewer if isinstance(event, OutputDelta)]
    assert [chunk for chunk in chunks if not chunk.tokens] == rests
    assert len(chunks) <= 3 * (1 + len(fewer) - len(chunks)) + len(rests)


def _streams(events: list[ClientEvent]) -> list[tuple[object, ...]]:
    """Returns what each sequence's reader gets: positions in order, text, nothing after the end."""
    streams = []
    for index in range(3):
        token_ids: list[int] = []
        text, logprobs, tops, has_ended = "", [], [], False
        reason = pb.FINISH_REASON_UNSPECIFIED
        for response in map(to_message, events):
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
