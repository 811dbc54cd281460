import threading
from collections.abc import Iterator

import pytest

from baton import Client, SamplingParams, errors
from baton.client.client import FinishReason, Message, TokenLogprobs, _is_name
from baton.v1 import inference_pb2 as pb
from tests.support.router.fake_router import (
    ANSWER,
    TWO,
    FakeRouter,
    accepted,
    finished,
    free_port,
    running,
    tokens,
)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=10.0) as client:
        yield client


@pytest.mark.parametrize("port", ["", ":1"])
@pytest.mark.parametrize(
    ("host", "is_name"),
    [("a.b", True), ("dns:///a", True), ("127.0.0.1", False), ("[::1]", False), ("::1", False),
     ("localhost", False), ("dns:///127.0.0.1", False), ("unix:/a", False)],
)  # fmt: skip
def test_addresses_without_ip_are_names(host, is_name, port):
    assert _is_name(host + port) == is_name


def test_generation_streams_chunks_as_the_router_sends_them(client):
    chunks = list(client.generate("Hi"))
    assert [chunk.text for chunk in chunks] == ["Hel", "lo"]
    assert [chunk.token_ids for chunk in chunks] == [(5, 6), (7,)]
    assert [chunk.position for chunk in chunks] == [0, 2]
    assert chunks[0].logprobs == (-0.5, -0.5)


def test_generation_text_covers_chunks_already_read(client):
    generation = client.generate("Hi")
    next(generation)
    assert generation.text() == "Hello"
    assert generation.token_ids() == [5, 6, 7]


def test_accepted_shows_the_placement_before_the_first_chunk(client, router):
    router.script = [accepted(), None]
    with client.generate("Hi") as generation:
        assert generation.accepted.request_id == "r-1"
        assert generation.accepted.num_prompt_tokens == 3
        assert generation.accepted.placement.prefill_worker == "p0"
        candidate = generation.accepted.placement.candidates[0]
        assert (candidate.worker, candidate.role, candidate.terms) == ("d0", "decode", {"queue": 3})
        assert generation.finished is None


def test_accepted_consumes_no_chunk(client):
    generation = client.generate("Hi")
    assert generation.accepted.request_id == "r-1"
    assert [chunk.text for chunk in generation] == ["Hel", "lo"]


def test_finished_has_reason_usage_and_timings(client):
    generation = client.generate("Hi")
    generation.text()
    assert generation.finished.reason is FinishReason.STOP_STRING
    assert generation.finished.stop_string == "\n"
    assert generation.finished.usage.num_transferred_bytes == 4096
    assert generation.finished.timings.admission == 0.0025
    assert generation.finished.timings.total == 1.0
    assert generation.finished.timings.exposed_transfer is None


TWO_ASKED = SamplingParams(n=2, temperature=1.0)


def test_generation_assembles_interleaved_sequences(client, router):
    router.script = TWO
    generation = client.generate("Hi", TWO_ASKED)
    assert [chunk.sequence_index for chunk in generation] == [1, 0, 1, 0]
    assert generation.texts() == ["Yo", "Hey"]
    assert generation.text() == "Yo"
    assert generation.token_ids() == [8, 9]
    first, second = generation.completions()
    assert (second.text, second.token_ids, second.logprobs) == ("Hey", (5, 6), (-0.5, -0.5))
    assert (first.finished.score, second.finished.score) == (-0.25, -0.5)
    assert generation.finished is first.finished


def test_generation_finishes_with_its_last_sequence(client, router):
    router.script = [*TWO[:-1], None]
    with client.generate("Hi", TWO_ASKED) as generation:
        for _ in range(4):
            next(generation)
        assert generation.finished is None


def test_generation_fails_when_a_sequence_never_finishes(client, router):
    router.script = TWO[:-1]
    with pytest.raises(errors.InternalError):
        client.generate("Hi", TWO_ASKED).texts()


def test_completions_has_one_entry_for_one_sequence(client):
    generation = client.generate("Hi")
    assert generation.texts() == ["Hello"]
    (completion,) = generation.completions()
    assert completion.finished is generation.finished
    assert completion.finished.score is None
    assert completion.top_logprobs == ()


def test_chunks_carry_top_logprobs_of_each_token(client, router):
    top = pb.TopLogprobs(token_ids=[9, 5], logprobs=[-0.25, -0.5])
    chunk = pb.TokenChunk(token_ids=[5], text="a", logprobs=[-0.5], top_logprobs=[top])
    router.script = [accepted(), pb.GenerateResponse(tokens=chunk), finished()]
    generation = client.generate("Hi", SamplingParams(logprobs=True, top_logprobs=2))
    assert next(generation).top_logprobs == ({9: -0.25, 5: -0.5},)
    assert list(generation.completions()[0].top_logprobs[0]) == [9, 5]


@pytest.mark.parametrize("with_top", [True, False])
def test_prompt_logprobs_arrive_with_the_first_chunk(client, router, with_top):
    tops = [pb.TopLogprobs(token_ids=[i], logprobs=[-0.125]) for i in range(3)]
    scored = [
        pb.PromptLogprobs(
            position=1 + start,
            logprobs=[-float(i) for i in range(start, stop)],
            top_logprobs=tops[start:stop] if with_top else [],
        )
        for start, stop in ((0, 2), (2, 3))
    ]
    events = [pb.GenerateResponse(prompt_logprobs=message) for message in scored]
    router.script = [accepted(), *events, *ANSWER[1:]]
    generation = client.generate("Hi", SamplingParams(prompt_logprobs=1))
    next(generation)
    assert generation.prompt_logprobs == [
        TokenLogprobs(-float(i), {i: -0.125} if with_top else {}) for i in range(3)
    ]
    assert generation.text() == "Hello"


def test_generate_sends_the_priority(client, router):
    client.generate("Hi", priority=-7).text()
    client.generate("Hi").text()
    assert [request.priority for request in router.requests] == [-7, 0]


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 0.5])
def test_generate_rejects_a_priority_outside_int32(client, priority):
    with pytest.raises(errors.InvalidArgumentError, match="priority"):
        client.generate("Hi", priority=priority)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Hi", "text"),
        ([1, 2, 3], "token_ids"),
        ((1, 2), "token_ids"),
        ([Message("user", "Hi")], "chat"),
        ([{"role": "user", "content": "Hi"}], "chat"),
    ],
)
def test_generate_sends_text_tokens_or_chat(client, router, prompt, kind):
    client.generate(prompt).text()
    assert router.requests[0].WhichOneof("input") == kind


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "input"),
        ([1, -2], "token_ids.ids[1]"),
        ([1, 2**32], "token_ids.ids[1]"),
        ([1, "two"], "token_ids.ids[1]"),
        ([{"role": "user"}], "chat.messages[0]"),
        ([{"role": "user", "content": "Hi"}, 3], "chat.messages[1]"),
        ([{"role": "user", "content": None}], "chat.messages[0]"),
    ],
)
def test_generate_names_the_field_of_an_invalid_prompt(client, prompt, field):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        client.generate(prompt)
    assert caught.value.field == field


def test_generate_sends_every_parameter(client, router):
    params = SamplingParams(max_tokens=4, temperature=0.5, stop=("x",), seed=2**63)
    client.generate("Hi", params, model="tiny", request_id="mine", clamp_max_tokens=True).text()
    client.generate("Hi", SamplingParams(temperature=0.5)).text()
    client.generate("Hi").text()
    asked, *unseeded = router.requests
    plain = unseeded[-1]
    assert (asked.model, asked.request_id) == ("tiny", "mine")
    assert (asked.sampling.max_tokens, asked.sampling.temperature) == (4, 0.5)
    assert (asked.sampling.seed, list(asked.sampling.stop)) == (2**63, ["x"])
    assert all(request.sampling.HasField("seed") for request in unseeded)
    assert unseeded[0].sampling.seed != plain.sampling.seed
    assert asked.sampling.HasField("n")
    assert not asked.sampling.HasField("top_p"), "the model has a default"
    assert [field.name for field, _ in plain.sampling.ListFields()] == ["seed"]
    assert (asked.clamp_max_tokens, plain.clamp_max_tokens) == (True, False)


def test_generate_uses_its_own_timeout_or_that_of_the_client(client, router):
    client.generate("Hi", timeout=3.0).text()
    client.generate("Hi").text()
    # gRPC rounds what it sends up by a percent or so.
    assert router.remaining == [pytest.approx(3.0, abs=0.5), pytest.approx(10.0, abs=0.5)]


def test_generation_keeps_type_and_details_of_a_mid_stream_error(client, router):
    router.script = [*ANSWER[:2], errors.OverloadedError("full", retry_after=2.0)]
    generation = client.generate("Hi")
    assert next(generation).text == "Hel"
    with pytest.raises(errors.OverloadedError, match="full") as caught:
        next(generation)
    assert caught.value.retry_after == 2.0
    with pytest.raises(errors.OverloadedError):
        generation.text()


def test_accepted_raises_when_the_request_is_rejected(client, router):
    router.script = [errors.InvalidArgumentError("sampling.top_p", "is 2")]
    with pytest.raises(errors.InvalidArgumentError) as caught:
        _ = client.generate("Hi").accepted
    assert caught.value.field == "sampling.top_p"


def test_generation_hides_the_text_of_a_router_bug(client, router):
    router.script = [ValueError("secret")]
    with pytest.raises(errors.InternalError) as caught:
        client.generate("Hi").text()
    assert "secret" not in str(caught.value)


def test_generation_raises_deadline_exceeded(client, router):
    router.script = [accepted(), None]
    with pytest.raises(errors.DeadlineExceededError):
        client.generate("Hi", timeout=0.2).text()


@pytest.mark.parametrize(
    "script",
    [
        [],
        [accepted()],
        [tokens(0, [1], "x"), finished()],
        [accepted(), tokens(1, [6], "x"), tokens(0, [5], "y"), finished()],
    ],
)
def test_generation_fails_when_the_stream_breaks_its_contract(client, router, script):
    router.script = script
    generation = client.generate("Hi")
    for _ in range(2):  # reading on makes no answer of the rest
        with pytest.raises(errors.InternalError):
            generation.text()


def test_leaving_a_generation_early_cancels_the_request(client, router):
    router.script = [*ANSWER[:2], None]
    with client.generate("Hi") as generation:
        next(generation)
    assert router.ended.wait(1.0)


def test_reading_after_cancel_raises_cancelled(client, router):
    router.script = [*ANSWER[:2], None]
    generation = client.generate("Hi")
    next(generation)
    generation.cancel()
    with pytest.raises(errors.CancelledError):
        next(generation)
    assert router.ended.wait(1.0)


def test_cancel_from_another_thread_wakes_the_reader(client, router):
    router.script = [accepted(), None]
    generation = client.generate("Hi")
    timer = threading.Timer(0.1, generation.cancel)
    timer.start()
    with pytest.raises(errors.CancelledError):
        generation.text()
    timer.join()


def test_cancel_after_the_end_does_nothing(client):
    with client.generate("Hi") as generation:
        assert generation.text() == "Hello"
    generation.cancel()
    assert generation.text() == "Hello"


def test_client_returns_plain_values_from_unary_calls(client):
    assert client.tokenize("Hi").token_ids == (1, 2)
    assert client.tokenize([Message("user", "Hi")]).text == "rendered"
    model = client.get_model()
    assert (model.name, model.max_model_len, model.eos_token_ids) == ("tiny", 64, (0,))
    worker = client.list_workers()[0]
    assert (worker.id, worker.role, worker.state, worker.epoch) == ("d0", "decode", "ready", 7)
    assert worker.version == "1.3"
    client.abort("r-1")
    with pytest.raises(errors.NotFoundError, match="no request other"):
        client.abort("other")


def test_client_raises_unavailable_at_once_without_server():
    with (
        Client(f"127.0.0.1:{free_port()}", timeout=10.0) as client,
        pytest.raises(errors.UnavailableError),
    ):
        client.get_model()


def test_client_waits_for_a_starting_server_when_asked_to():
    port = free_port()
    name: list[str] = []
    with Client(f"127.0.0.1:{port}", timeout=10.0, wait_for_ready=True) as client:
        pending_call = threading.Thread(target=lambda: name.append(client.get_model().name))
        pending_call.start()
        pending_call.join(0.2)
        with running(FakeRouter(), port):
            pending_call.join(10.0)
    assert name == ["tiny"]
