"""Parts of parsed outputs: the same however tokens arrive, and once for a client that resumes."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from baton.client.progress import Progress
from baton.client.router_messages import resumed_request
from baton.client.types import Completion, Part, TextPart, ToolCall, ToolCallStart
from baton.models import locate
from baton.models.detokenizer import Detokenizer
from baton.sampling import SamplingParams
from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.ending import FinishReason
from baton_router.call.output_delta import OutputDelta
from baton_router.call.output_format import ParsingOptions, Tool
from baton_router.call.parts import Text
from baton_router.call.request import Request
from baton_router.call.request_parsing import RequestParsing
from baton_router.call.tokens import Tokens
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.events import Accepted, coalesced
from baton_router.text.output_parsing.formats.catalog import output_format
from tests.support.router.calls import told_endings
from tests.support.router.scripted import card
from tests.support.router.written import ids_of

ACCEPTED = Accepted(Request("r", (5, 6), SamplingParams()), None, Account(Timings(0.0), 2))
TOOLS = (Tool("weather"), Tool("time", strict=True))
OSLO = '{"city": "Oslo 漢"}'
TEXTS = [
    "<think>\nOslo: é 漢.\n</think>\n\nLet me look. "
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "It <tool rains. <thi",
    '<think>no end of it <tool_call>{"name',
    'Yes.\n<tool_call>\n{"name": "time", "argum',
]


@cache
def parsing() -> RequestParsing:
    options = ParsingOptions(TOOLS, splits_reasoning=True)
    return RequestParsing(output_format("hermes", "think", card().tokenizer), options)


def answer_of(
    received: tuple[tuple[int, ...], ...] = (), told: tuple[Any, ...] = (), **params: Any
) -> Answer:
    sampling = SamplingParams(max_tokens=500, **params)
    request = Request("r", (5, 6), sampling, 0, received, told, parsing=parsing())
    return Answer(request, card(), 0.0)


def written(answer: Answer, ids: list[int], sizes: list[int], at: int = 0) -> list[Any]:
    """Returns the client's events of an output that arrives in messages of these sizes."""
    events: list[Any] = []
    left = list(sizes)
    while at < len(ids):
        size = left.pop() if left else len(ids)
        reason = FinishReason.END_OF_SEQUENCE if at + size >= len(ids) else None
        delta = OutputDelta(0, Tokens(at, ids[at : at + size]), finish_reason=reason)
        events += answer.on_event(delta)
        at += size
    return events


def completed(progress: Progress) -> Completion:
    (completion,) = progress.completions()
    return completion


def read(events: list[Any]) -> Completion:
    progress = Progress(1)
    progress.add(pb.GenerateResponse(accepted=pb.Accepted(request_id="r")))
    for event in events:
        progress.add(to_message(event))
    return completed(progress)


def seen(completion: Completion) -> tuple[str, str, tuple[ToolCall, ...]]:
    return completion.content, completion.reasoning, completion.tool_calls


def test_answer_splits_reasoning_text_and_calls():
    completion = read(written(answer_of(), ids_of(TEXTS[0]), []))
    assert completion.reasoning == "Oslo: é 漢."
    assert completion.content == "Let me look."
    assert [(c.name, c.arguments) for c in completion.tool_calls] == [
        ("weather", OSLO),
        ("time", "{}"),
    ]
    assert completion.text == TEXTS[0]


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 9), max_size=60), st.integers(1, 5))
def test_parts_are_the_same_however_tokens_arrive(text, sizes, num_together):
    ids = ids_of(text)
    whole = written(answer_of(), ids, [])
    expected, num_reasoning = seen(read(whole)), num_reasoning_tokens(whole)
    events = written(answer_of(), ids, sizes)
    batches = [events[i : i + num_together] for i in range(0, len(events), num_together)]
    fewer = [event for batch in batches for event in coalesced(batch)]
    assert seen(read(fewer)) == expected
    assert num_reasoning_tokens(fewer) == num_reasoning
    assert bool(num_reasoning) == bool(expected[1])


def num_reasoning_tokens(events: list[Any]) -> int:
    return sum(event.num_reasoning_tokens for event in events if isinstance(event, OutputDelta))


def test_coalesced_joins_pieces_of_one_part():
    events = written(answer_of(), ids_of("It rains a lot in Oslo."), [1] * 30)
    chunks = [event for event in coalesced(events) if isinstance(event, OutputDelta)]
    assert [chunk.parts for chunk in chunks] == [[Text("It rains a lot in Oslo.")]]


@given(
    st.sampled_from(TEXTS),
    st.lists(st.integers(0, 30), max_size=3),
    st.lists(st.integers(1, 5), max_size=60),
)
def test_resumed_client_gets_each_part_once(text, losses, sizes):
    """`losses`: how many messages of each call arrive before its router is lost."""
    ids = ids_of(text)
    expected = seen(read(written(answer_of(), ids, [])))
    asked, progress = pb.GenerateRequest(token_ids=pb.TokenIds(ids=(5, 6))), Progress(1)
    for loss in [*losses, None]:
        progress.begin_call()
        resumed = resumed_request(asked, progress.accepted, progress.received).continue_from
        received = tuple(tuple(sequence.ids) for sequence in resumed)
        resuming = answer_of(received, told_endings(resumed))
        events = [ACCEPTED, *resuming.conclude()]
        if not resuming.is_complete:
            events += written(resuming, ids, sizes, len(received[0]) if received else 0)
        for event in list(coalesced(events))[:loss]:
            progress.add(to_message(event))
        if progress.finished is not None:
            break
    assert seen(completed(progress)) == expected


def test_attempts_after_losses_repeat_no_part():
    ids = ids_of(TEXTS[0])
    expected = seen(read(written(answer_of(), ids, [])))
    answer, events = answer_of(), []
    for begin, end in ((0, 20), (20, 41), (41, len(ids))):
        reason = FinishReason.END_OF_SEQUENCE if end == len(ids) else None
        events += answer.on_event(OutputDelta(0, Tokens(begin, ids[begin:end]), "", reason))
        answer.restart()
    assert seen(read(events)) == expected


@pytest.mark.symptom(
    "mlx-knife#68, SwiftLM#126, SwiftLM#133",
    there="a stop string that spans several tokens reaches the client in a stream",
    here="Holds back what may begin it, and sends nothing of it.",
)
def test_stop_string_ends_parts_before_it():
    events = written(answer_of(stop=("a lot",)), ids_of("It rains a lot in Oslo."), [2] * 20)
    assert read(events).content == "It rains "


@pytest.mark.parametrize("is_short", [False, True], ids=["long", "short"])
def test_call_ids_are_a_function_of_the_request(is_short):
    made = RequestParsing(parsing().format, parsing().options, has_short_ids=is_short)
    ids = {made.call_id(*at) for at in [("r", 0, 0), ("r", 0, 1), ("r", 1, 0), ("s", 0, 0)]}
    assert len(ids) == 4
    assert made.call_id("r", 0, 0) in ids
    lengths = {len(one) for one in ids}
    assert lengths == ({9} if is_short else {29})
    assert all(one.removeprefix("call_").isalnum() for one in ids)


def test_detokenizer_shows_kept_special_tokens_alone():
    tokenizer = Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken("<|call|>", special=True)])
    kept_id = tokenizer.token_to_id("<|call|>")
    ids = [*ids_of("é 漢"), kept_id, 2, *ids_of(" after")]
    for kept, expected in (({kept_id: "<|call|>"}, "é 漢<|call|> after"), ({}, "é 漢 after")):
        detokenizer = Detokenizer(tokenizer, kept)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == expected


def test_completion_joins_pieces_of_each_call():
    parts: tuple[Part, ...] = (TextPart("a"), ToolCallStart(0, "x", "time"), TextPart("b"))
    completion = read(written(answer_of(), ids_of("a"), []))
    joined = Completion(completion.text, completion.token_ids, (), (), completion.finished, parts)
    assert (joined.content, joined.tool_calls) == ("ab", (ToolCall("x", "time", ""),))
