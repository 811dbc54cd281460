"""Fields of a request that reach the engine, and grammars on either worker."""

import asyncio
import json
import math
import re
import time
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.engine.metering.work_meter import WorkDone
from baton.engine.request import KvSource, Purpose
from baton.models import locate
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton.worker.engine_messages import engine_request, work_done_to_message
from tests.support.worker.pair import pair_of
from tests.support.worker.reference import alone

PHONE = Grammar(GrammarKind.REGEX, r"[0-9]{3}-[0-9]{3}")
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["age"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)


@cache
def tokenizer() -> Any:
    return Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")


def text_of(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("grammar", "pattern", "n"),
    [(PHONE, r"\d{3}-\d{3}", 1), (PERSON, r'\{"age": ?[1-9]\d?\}', 3)],
    ids=["regex", "schema"],
)
async def test_grammar_holds_from_first_token_on_either_worker(grammar, pattern, n):
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, n=n, grammar=grammar)
    prompt = tokenizer().encode("Tom is a boy. His number is").ids
    (expected,) = alone(locate("tiny"), [prompt], params)
    async with pair_of("tiny", max_num_batched_tokens=32) as pair:
        answer = await pair.hand_over(prompt, params)
        local = await pair.decode_alone(prompt, params)
    assert [o.token_ids for o in answer.outputs] == expected
    assert [o.token_ids for o in local.outputs] == expected
    assert len(expected) == n
    for token_ids in expected:
        assert re.fullmatch(pattern, text_of(token_ids))
    # The tokens alone do not tell, and what follows the last one would be no match.
    assert {o.reason for o in answer.outputs} == {pb.FINISH_REASON_END_OF_SEQUENCE}
    if n == 1:
        assert answer.prefill_result.first_tokens[0].token_id == expected[0][0]


async def test_grammar_continues_after_tokens_of_earlier_attempt():
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, grammar=PHONE)
    prompt = tokenizer().encode("Call me at").ids
    ((whole,),) = alone(locate("tiny"), [prompt], params)
    async with pair_of("tiny") as pair:
        for known in range(1, len(whole) - 1):
            request = pair.prefill_request(prompt, params, decode_worker="")
            request.token_ids.extend(whole[:known])
            events = [r async for r in pair.to_prefill.Prefill(request, timeout=10.0)]
            (first,) = events[-1].result.first_tokens
            assert (first.position, first.token_id) == (known, whole[known])


@pytest.mark.parametrize(
    "message_class", [prefill_pb2.PrefillRequest, decode_pb2.DecodeGenerateRequest]
)
def test_engine_request_has_priority_and_deadline_of_message(message_class):
    message = message_class(request_id="a", token_ids=[1, 2], num_prompt_tokens=2, priority=-3)
    before = time.monotonic()
    request = engine_request(message, 7.5, purpose=Purpose.PREFILL, kv_source=KvSource.EXTERNAL)
    assert before <= request.arrival_time <= time.monotonic()
    assert (request.priority, request.token_ids, request.num_prompt_tokens) == (-3, (1, 2), 2)
    assert (request.purpose, request.kv_source) == (Purpose.PREFILL, KvSource.EXTERNAL)


@pytest.mark.parametrize("remaining", [None, 7.5, 600.0])
@pytest.mark.parametrize("due", [None, 1.5, -2.5])
@pytest.mark.parametrize(
    "message_class", [prefill_pb2.PrefillRequest, decode_pb2.DecodeGenerateRequest]
)
def test_engine_request_has_the_due_time_of_its_first_token(message_class, due, remaining):
    """Not that of its last one, which 600 s are for."""
    message = message_class(request_id="a", token_ids=[1, 2], num_prompt_tokens=2)
    if due is not None:
        message.first_token_due.FromMilliseconds(int(due * 1000))
    request = engine_request(message, remaining)
    expected = min(30.0, remaining or math.inf) if due is None else due
    assert request.first_token_deadline == request.arrival_time + expected


async def test_priority_policy_serves_smaller_priority_first():
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    done: list[int] = []

    async def result_of(call: Any, priority: int) -> None:
        while (await call.read()).WhichOneof("event") != "result":
            pass
        done.append(priority)

    # A long prompt holds the worker up while the others arrive.
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_blocks": 200}
    async with pair_of("tiny", policy="priority", **few) as pair:
        reading = []
        for priority, length in ((0, 1800), (5, 40), (1, 40), (3, 40)):
            prompt = [7 + priority] * length
            request = pair.prefill_request(prompt, params, decode_worker="", priority=priority)
            call = pair.to_prefill.Prefill(request, timeout=20.0)
            assert (await call.read()).HasField("admitted")
            reading.append(asyncio.create_task(result_of(call, priority)))
        await asyncio.gather(*reading)
    assert done == [0, 1, 3, 5]


def test_work_done_message_has_every_total():
    message = work_done_to_message(WorkDone(1, 2, 3, 4, 0.5, 6))
    assert (message.num_steps, message.num_prompt_tokens, message.num_prompt_pairs) == (1, 2, 3)
    assert (message.num_decode_tokens, message.num_encoder_tokens) == (4, 6)
    assert message.busy.ToMilliseconds() == 500
