"""Assembly of the client's events from the workers', in every order of arrival."""

import random
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.client.progress import Progress
from baton.client.router_messages import resumed_request
from baton.errors import InternalError
from baton.models import locate
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.ending import Ending, FinishReason
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Request
from baton_router.call.tokens import Tokens
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.events import Accepted, ClientEvent, Finished, coalesced
from baton_router.lifecycle.worker_events import (
    Draining,
    KvReady,
    PrefillResult,
    PrefillStarted,
    PromptScores,
    Received,
    SequenceEnded,
    WorkerEvent,
)
from baton_router.lifecycle.worker_wire import decoded, event_of
from baton_router.routing.fleet.worker_model import WorkDone
from baton_router.text.model_card import ModelCard, read_model_card
from tests.support.router.calls import told_endings

END, STOP_TOKEN, STOP_STRING, LENGTH = FinishReason


@cache
def card() -> ModelCard:
    return read_model_card(locate("tiny"))


@cache
def ids(letters: str) -> list[int]:
    return [card().tokenizer.encode(c, add_special_tokens=False).ids[0] for c in letters]


def answer(**params: object) -> Answer:
    sampled = {"temperature": 1.0, "max_tokens": 9, **params}
    return Answer(Request("r", (5, 6), SamplingParams(**sampled)), card(), 0.0)


def tokens(
    index: int, position: int, letters: str, reason: FinishReason | None = None
) -> OutputDelta:
    return OutputDelta(index, Tokens(position, list(ids(letters))), finish_reason=reason)


def finished(
    index: int, reason: FinishReason = LENGTH, score: float | None = None
) -> SequenceEnded:
    return SequenceEnded(index, Ending(reason, score=score))


def ready(num_reused_blocks: int = 0, num_blocks: int = 2) -> KvReady:
    return KvReady(NO_WORK, 0.0, num_blocks, 0, num_reused_blocks, "")


def result(letter: str = "a", reason: FinishReason | None = None) -> PrefillResult:
    return PrefillResult(NO_WORK, [tokens(0, 0, letter, reason)])


NO_WORK = WorkDone(0, 0, 0, 0, 0.0)
READY = ready()


def texts(events: list[ClientEvent]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, OutputDelta):
            found[event.sequence_index] = found.get(event.sequence_index, "") + event.text
    return found


def endings(events: list[ClientEvent]) -> list[tuple[int, FinishReason]]:
    ends = [event for event in events if isinstance(event, Finished)]
    return [(event.sequence_index, event.ending.reason) for event in ends]


def shown(an_answer: Answer, *events: Received) -> list:
    return [response for event in events for response in an_answer.on_event(event)]


@given(st.lists(st.text("abcde", min_size=1, max_size=8), min_size=2, max_size=4), st.randoms())
def test_answer_orders_tokens_of_interleaved_sequences(letters, order):
    queues = []
    for index, text in enumerate(letters):
        events, at = [], 0
        while at < len(text):
            size = order.randint(1, len(text) - at)
            events.append(tokens(index, at, text[at : at + size]))
            at += size
        queues.append([*events, finished(index)])
    several, events = answer(n=len(letters)), []
    while any(queues):
        assert not several.is_complete
        queue = order.choice([q for q in queues if q])
        events += several.on_event(queue.pop(0))
    assert several.is_complete
    assert texts(events) == dict(enumerate(letters))
    assert sorted(endings(events)) == [(i, LENGTH) for i in range(len(letters))]
    assert events[-1].account.num_output_tokens == sum(map(len, letters))


@pytest.mark.parametrize("count", [0, 2])
def test_answer_refuses_prefill_without_exactly_one_token(count):
    with pytest.raises(InternalError, match=f"brought {count} first tokens"):
        answer().on_event(PrefillResult(NO_WORK, [tokens(0, 0, "a")] * count))


@pytest.mark.parametrize("fields", [{"logprobs": [-1.0]}, {"top_logprobs": [pb.TopLogprobs()] * 3}])
def test_router_refuses_tokens_with_partial_logprobs(fields):
    message = decode_pb2.DecodeTokens(token_ids=ids("ab"), **fields)
    with pytest.raises(InternalError, match="2 tokens came with"):
        event_of(decode_pb2.DecodeGenerateResponse(tokens=message))


def test_decoded_tokens_are_those_of_message():
    tokens_of_two = decode_pb2.DecodeTokens(position=3, token_ids=ids("ab"), finish_reason=4)
    message = decode_pb2.DecodeGenerateResponse(tokens=tokens_of_two)
    assert decoded(message.SerializeToString()) == event_of(message) == tokens(0, 3, "ab", LENGTH)
    other = decode_pb2.DecodeGenerateResponse(draining=decode_pb2.DecodeDraining())
    assert decoded(other.SerializeToString()) == other
    assert event_of(other) == Draining()


def test_event_of_newer_worker_has_no_kind():
    assert event_of(decode_pb2.DecodeGenerateResponse()) == WorkerEvent()
    assert answer().on_event(WorkerEvent()) == []


def test_answer_finishes_each_sequence_independently():
    several = answer(n=2)
    events = shown(several, tokens(1, 0, "ab"), finished(1, END))
    assert endings(events) == [(1, END)]
    assert not several.is_complete
    assert endings(shown(several, tokens(0, 0, "c"), finished(0))) == [(0, LENGTH)]
    assert several.is_complete


@pytest.mark.parametrize("event", [tokens(1, 0, "", STOP_TOKEN), finished(1, STOP_TOKEN)])
def test_answer_survives_stop_token_before_first_token(event):
    made = answer(n=2)
    made.on_event(result())
    (ended,) = made.on_event(event)
    assert (ended.sequence_index, ended.ending) == (1, Ending(FinishReason.STOP_TOKEN))


def test_answer_ends_only_sequence_with_stop_string():
    several = answer(n=2, stop=("bc",))
    events = shown(several, tokens(0, 0, "abc"), tokens(1, 0, "ab"))
    assert texts(events) == {0: "a", 1: "a"}
    assert endings(events) == [(0, STOP_STRING)]
    # The worker knows nothing of it and goes on.
    assert shown(several, tokens(0, 3, "de"), finished(0)) == []
    events = shown(several, tokens(1, 2, "de"), finished(1))
    assert texts(events) == {1: "bde"}
    assert endings(events) == [(1, LENGTH)]
    assert events[-1].account.num_output_tokens == 7


def test_answer_shows_text_held_for_stop_string_at_end():
    several = answer(n=2, stop=("bc",))
    assert texts(shown(several, tokens(0, 0, "ab"))) == {0: "a"}
    assert texts(shown(several, finished(0))) == {0: "b"}


def test_answer_hides_prefill_token_of_several_sequences():
    several = answer(n=2)
    assert several.on_event(result("e", END)) == []
    events = shown(several, tokens(0, 0, "a"), finished(0), tokens(1, 0, "b"), finished(1))
    assert texts(events) == {0: "a", 1: "b"}


def test_answer_hides_prefill_token_when_best_of_exceeds_n():
    best = answer(n=1, best_of=3)
    assert best.on_event(result("e")) == []
    assert texts(shown(best, tokens(0, 0, "a"), finished(0))) == {0: "a"}
    assert best.is_complete


def test_answer_reports_scores_of_beams():
    beams = answer(n=2, beam_width=3, temperature=0.0)
    events = shown(
        beams, tokens(0, 0, "a"), finished(0, END, -0.5), tokens(1, 0, "b"), finished(1, END, -0.75)
    )
    scores = [event.ending.score for event in events if isinstance(event, Finished)]
    assert scores == [-0.5, -0.75]
    plain = shown(answer(), tokens(0, 0, "a"), finished(0))
    assert plain[-1].ending.score is None


def test_answer_sends_prompt_logprobs_before_first_tokens():
    asked = answer(prompt_logprobs=0)
    assert shown(asked, READY, tokens(0, 0, "ab"), finished(0)) == []
    (first,) = asked.on_event(PromptScores(1, [-0.5], []))
    assert first == PromptScores(1, [-0.5], [])
    events = asked.on_event(result("a"))
    assert texts(events) == {0: "ab"}
    assert endings(events) == [(0, LENGTH)]


@pytest.mark.parametrize("from_prefill", [True, False])
def test_answer_passes_top_logprobs_with_their_token(from_prefill):
    tops = [pb.TopLogprobs(token_ids=[7 + i, 8], logprobs=[-0.25, -0.5]) for i in range(2)]
    if from_prefill:
        token = prefill_pb2.FirstToken(token_id=7, logprob=-0.25, top_logprobs=tops[0])
        result = prefill_pb2.PrefillResult(first_tokens=[token])
        events = answer().on_event(event_of(prefill_pb2.PrefillResponse(result=result)))
        assert list(to_message(events[0]).tokens.top_logprobs) == tops[:1]
    else:
        decoded = decode_pb2.DecodeTokens(
            token_ids=[7, 8], logprobs=[-0.25, -0.5], top_logprobs=tops
        )
        message = decode_pb2.DecodeGenerateResponse(tokens=decoded)
        events = shown(answer(), event_of(message))
        assert list(to_message(events[0]).tokens.top_logprobs) == tops


@given(
    st.lists(st.text("abcde", min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(0, 8), max_size=4),
    st.randoms(),
)
def test_answer_shows_each_token_once_over_many_attempts(letters, cuts, order):
    asked = answer(n=len(letters), max_tokens=12)
    events: list[ClientEvent] = []
    for cut in [*cuts, None]:
        if asked.is_complete:
            break
        work = asked.work()
        begin = len(work.output)
        begins = [begin] if len(letters) == 1 else [len(o or ()) for o in work.outputs]
        for index, at in enumerate(begins or [0] * len(letters)):
            output = [] if not work.outputs else work.outputs[index]
            if len(letters) == 1 or output is not None:
                assert at == len(shown_letters(events, index))
        messages = [READY]
        for index, text in enumerate(letters):
            if work.outputs and work.outputs[index] is None:
                assert (index, LENGTH) in endings(events)
                continue
            at = begins[index] if begins else 0
            while at < len(text):
                size = order.randint(1, len(text) - at)
                messages.append(tokens(index, at, text[at : at + size]))
                at += size
            messages.append(finished(index))
        if 0 < begin < len(letters[0]):
            # The prefill worker chose the first one, and the decode worker says it again.
            first = tokens(0, begin, letters[0][begin])
            events += asked.on_event(PrefillResult(NO_WORK, [first]))
        for message in messages[:cut]:
            events += asked.on_event(message)
        asked.restart()
        events += asked.conclude()
    assert asked.is_complete
    assert texts(events) == dict(enumerate(letters))
    assert sorted(endings(events)) == [(i, LENGTH) for i in range(len(letters))]
    assert events[-1].account.num_output_tokens == sum(map(len, letters))


@given(
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=2),
    st.sampled_from([LENGTH, END, STOP_TOKEN]),
    st.lists(st.integers(0, 6), max_size=3),
    st.randoms(),
)
@example(["abc"], END, [1], random.Random(0))
def test_resumed_client_gets_each_text_and_reason_once(letters, reason, losses, order):
    """`losses`: how many messages of each call arrive before its router is lost. The text is held
    back at its end, as it could begin a stop string."""
    params = {"temperature": 1.0, "max_tokens": 9, "n": len(letters), "stop": ("czz", "abz")}
    asked, progress = pb.GenerateRequest(token_ids=pb.TokenIds(ids=(5, 6))), Progress(len(letters))
    for loss in [*losses, None]:
        progress.begin_call()
        resumed = resumed_request(asked, progress.accepted, progress.received).continue_from
        received = tuple(tuple(sequence.ids) for sequence in resumed)
        told = told_endings(resumed)
        request = Request("r", (5, 6), SamplingParams(**params), 0, received, told)
        resuming = Answer(request, card(), 0.0)
        events = [Accepted(request, None, resuming.account), *resuming.conclude()]
        for index, text in enumerate(letters):
            at = len(received[index]) if received else 0
            while at < len(text):
                size = order.randint(1, len(text) - at)
                ends = reason if at + size == len(text) else None
                events += resuming.on_event(tokens(index, at, text[at : at + size], ends))
                at += size
        for event in list(coalesced(events))[:loss]:
            progress.add(to_message(event))
        if progress.finished is not None:
            break
    completions = progress.completions()
    assert [completion.text for completion in completions] == letters
    reasons = {completion.finished.reason.name for completion in completions}
    assert reasons == {reason.name}


def shown_letters(events: list[ClientEvent], index: int) -> list[int]:
    return [
        token_id
        for event in events
        if isinstance(event, OutputDelta) and event.sequence_index == index
        for token_id in event.tokens.token_ids
    ]


def test_answer_place_counts_tokens_of_earlier_attempts():
    single, several = answer(), answer(n=2)
    shown(single, READY, tokens(0, 0, "abc"))
    shown(several, READY, tokens(0, 0, "abc"), tokens(1, 0, "a"))
    assert (single.place, several.place) == (3, 4)
    single.restart()
    several.restart()
    shown(single, READY, tokens(0, 3, "d"))
    shown(several, READY, tokens(0, 3, "d"), tokens(1, 1, "bc"))
    assert (single.place, several.place) == (4, 7)


def test_answer_resumes_each_sequence_after_its_tokens():
    several = answer(n=4, stop=("bc",), max_tokens=3)
    assert several.work().outputs == ()
    shown(several, READY, tokens(0, 0, "a"), tokens(1, 0, "abc"), tokens(2, 0, "ded"))
    several.restart()
    several.conclude()
    work = several.work()
    assert work.outputs == (tuple(ids("a")), None, None, ())
    assert (work.token_ids, work.output) == ((5, 6), ())
    assert (work.num_sequences, work.num_tokens) == (2, 3)


def test_answer_omits_sequence_complete_by_received_tokens():
    params = SamplingParams(temperature=1.0, n=2, max_tokens=2)
    received = (tuple(ids("ab")), tuple(ids("c")))
    asked = Answer(Request("r", (5, 6), params, received=received), card(), 0.0)
    assert asked.work().outputs == (None, tuple(ids("c")))


def test_outcome_counts_only_tokens_generated_here():
    """Also where a stop string ends the answer within the tokens that the client resumed with."""
    params = SamplingParams(temperature=1.0, max_tokens=9, stop=("bc",))
    resumed = Answer(Request("r", (5, 6), params, received=(tuple(ids("abcde")),)), card(), 0.0)
    resumed.admitted()
    assert resumed.outcome().num_tokens == 2
    resumed = Answer(Request("r", (5, 6), params, received=(tuple(ids("ab")),)), card(), 0.0)
    resumed.admitted()
    shown(resumed, READY, tokens(0, 2, "de"))
    assert resumed.outcome().num_tokens == 2 + 2


def test_usage_of_cached_tokens_is_the_most_of_one_attempt():
    single = answer()
    for num_cached in (1, 2, 1):
        single.on_event(PrefillStarted(0.0, 0.0, num_cached))
        single.restart()
    assert single.account.num_cached_prompt_tokens == 2


def test_usage_of_reused_blocks_is_the_most_of_one_attempt():
    single = answer()
    for num_reused in (1, 2, 1):
        single.on_event(ready(num_reused, num_blocks=3))
        single.restart()
    assert single.account.num_reused_decode_blocks == 2
    assert single.account.num_transferred_blocks == 9


@pytest.mark.parametrize("params", [{"n": 2, "best_of": 3}, {"beam_width": 3, "temperature": 0.0}])
def test_answer_restarts_ranked_sequences(params):
    ranked = answer(**params)
    shown(ranked, READY, tokens(0, 0, "ab"))
    ranked.restart()
    work = ranked.work()
    assert (work.outputs, work.output) == ((), ())
    assert (work.num_sequences, work.num_tokens) == (3, 2)


@pytest.mark.parametrize("params", [{"best_of": 2}, {"beam_width": 2, "temperature": 0.0}])
def test_answer_place_of_ranked_sequences_is_soon_unknown(params):
    ranked = answer(**params)
    shown(ranked, READY)
    assert ranked.place == 0
    ranked._handed_over_at -= 60.0
    assert ranked.place is None
