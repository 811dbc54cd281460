"""A generation whose router is lost, seen by its reader and by the routers."""

import asyncio

import grpc
import pytest

from baton import AsyncClient, Client, SamplingParams, errors
from baton.client.client import TokenLogprobs
from baton.client.progress import Progress
from baton.client.resume import MAX_FAILURES, Resumption, Routers
from baton.rpc.errors import DETAILS_KEY
from baton.v1 import inference_pb2 as pb
from tests.support.clock import Clock
from tests.support.router.fake_router import (
    FakeRouter,
    accepted,
    finished,
    free_port,
    of,
    running,
    tokens,
)
from tests.support.serving.fakes import serving

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Failed(grpc.RpcError):
    """A call that ended, by what a server said or by what gRPC did."""

    def __init__(self, code: grpc.StatusCode = UNAVAILABLE, *, is_said: bool = False) -> None:
        self._code = code
        self._metadata = ((DETAILS_KEY, b""),) if is_said else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata


def begun(num_routers: int = 1) -> tuple[Resumption, Progress]:
    request = pb.GenerateRequest(text="Hi")
    request.sampling.prompt_logprobs = 0
    return Resumption(request, Routers(num_routers), 10.0, clock=Clock()), Progress(1)


def accept(progress: Progress, *events: pb.GenerateResponse) -> None:
    message = accepted()
    message.accepted.seed = 77
    for event in (message, *events):
        progress.add(event)


def test_resumption_tries_each_router_once_before_acceptance():
    resumption, progress = begun(3)
    assert resumption.first_attempt().router == 0
    attempts = [resumption.next_attempt(Failed(is_said=True), progress) for _ in range(3)]
    assert [(attempt.router, attempt.pause, attempt.request.text) for attempt in attempts[:2]] == [
        *[(1, 0.0, "Hi"), (2, 0.0, "Hi")]
    ]
    assert attempts[2] is None


def test_resumption_retries_silent_router_until_window_expires():
    """While one drains, another one that has restarted may still be thought to be gone."""
    clock = Clock()
    resumption = Resumption(pb.GenerateRequest(text="Hi"), Routers(2), 10.0, clock=clock)
    progress = Progress(1)
    assert resumption.next_attempt(Failed(), progress).router == 1
    assert 0.05 <= resumption.next_attempt(Failed(is_said=True), progress).pause <= 0.1
    clock.now = 1.4
    assert resumption.next_attempt(Failed(), progress).router == 1
    clock.now = 1.6
    assert resumption.next_attempt(Failed(is_said=True), progress) is None


@pytest.mark.parametrize("is_begun", [True, False])
def test_resumption_moves_on_when_a_router_shuts_down(is_begun):
    """gRPC reports it as a cancellation that no client has asked for."""
    resumption, progress = begun(2)
    if is_begun:
        accept(progress)
    assert resumption.next_attempt(Failed(grpc.StatusCode.CANCELLED), progress).router == 1
    resumption, progress = begun(2)
    accept(progress)
    aborted = Failed(grpc.StatusCode.CANCELLED, is_said=True)
    assert resumption.next_attempt(aborted, progress) is None


def test_resumption_repeats_dropped_call_within_its_budget():
    resumption, progress = begun()
    dropped = Failed(grpc.StatusCode.CANCELLED)
    attempts = [resumption.next_attempt(dropped, progress) for _ in range(MAX_FAILURES)]
    assert all(attempt.router == 0 and attempt.pause > 0 for attempt in attempts)
    assert resumption.next_attempt(dropped, progress) is None


@pytest.mark.parametrize("num_dropped", [1, 2])
async def test_generation_repeats_call_that_server_cancelled(num_dropped):
    seen = []

    async def generate(request, context):
        seen.append(request.text)
        if len(seen) <= num_dropped:
            await context.abort(grpc.StatusCode.CANCELLED)
        for event in (accepted(), tokens(0, [5, 6], "Hel"), finished()):
            yield event

    async with serving(generate) as server:
        endpoint = server.server.endpoint
        async with AsyncClient(endpoint) as client:
            assert await client.generate("Hi").text() == "Hel"
        seen.clear()
        with Client(endpoint) as client:
            assert await asyncio.to_thread(client.generate("Hi").text) == "Hel"
        seen.clear()
        async with AsyncClient(endpoint, resume=False) as client:
            with pytest.raises(errors.CancelledError):
                await client.generate("Hi").text()
    assert seen == ["Hi"]


def test_resumption_cycles_through_routers_with_wait_for_ready():
    resumption = Resumption(
        pb.GenerateRequest(), Routers(2), 10.0, wait_for_ready=True, clock=Clock()
    )
    attempts = [resumption.next_attempt(Failed(), Progress(1)) for _ in range(30)]
    assert [attempt.router for attempt in attempts[:4]] == [1, 0, 1, 0]
    assert attempts[0].pause == 0.0
    assert all(0.05 <= attempt.pause <= 2.0 for attempt in attempts[1:])


def test_resumption_gives_up_at_once_with_a_single_router():
    resumption, progress = begun()
    assert resumption.next_attempt(Failed(), progress) is None


def test_resumption_asks_for_the_rest_of_an_accepted_request():
    resumption, progress = begun()
    accept(progress, tokens(0, [5, 6], "He"))
    attempt = resumption.next_attempt(Failed(), progress)
    assert (attempt.pause, attempt.timeout) == (0.0, 10.0)
    assert [list(sequence.ids) for sequence in attempt.request.continue_from] == [[5, 6]]
    assert (attempt.request.request_id, attempt.request.sampling.seed) == ("r-1", 77)
    assert not attempt.request.sampling.HasField("prompt_logprobs")


def test_resumption_reports_a_finish_reason_it_has_received():
    resumption, progress = begun()
    last = pb.TokenChunk(position=2, token_ids=[7], finish_reason=pb.FINISH_REASON_END_OF_SEQUENCE)
    accept(progress, tokens(0, [5, 6], "He"), pb.GenerateResponse(tokens=last))
    accept(progress, tokens(0, [], "llo"))  # text that was held back
    (sequence,) = resumption.next_attempt(Failed(), progress).request.continue_from
    assert list(sequence.ids) == [5, 6, 7]
    assert sequence.finish_reason == pb.FINISH_REASON_END_OF_SEQUENCE


def test_resumption_repeats_the_request_and_seed_without_tokens():
    resumption, progress = begun()
    accept(progress, pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(logprobs=[-1.0])))
    assert progress.prompt_logprobs == [TokenLogprobs(-1.0, {})]
    attempt = resumption.next_attempt(Failed(), progress)
    assert (list(attempt.request.continue_from), attempt.request.sampling.seed) == ([], 77)
    assert attempt.request.sampling.HasField("prompt_logprobs")
    assert progress.prompt_logprobs == []


@pytest.mark.parametrize("code", [UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_resumption_stops_when_a_live_router_reports_failure(code):
    resumption, progress = begun(2)
    accept(progress)
    assert resumption.next_attempt(Failed(code, is_said=True), progress) is None


@pytest.mark.parametrize(
    ("code", "goes_on"),
    [
        (UNAVAILABLE, True),
        (grpc.StatusCode.ALREADY_EXISTS, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
    ],
)
def test_resumption_retries_only_transient_codes_after_a_loss(code, goes_on):
    resumption, progress = begun()
    accept(progress)
    resumption.next_attempt(Failed(), progress)
    attempt = resumption.next_attempt(Failed(code, is_said=True), progress)
    assert (attempt is not None) == goes_on
    if attempt is not None:
        assert 0.05 <= attempt.pause <= 0.1


def test_resumption_gives_up_without_progress():
    resumption, progress = begun()
    accept(progress)
    for position in range(2):
        for _ in range(MAX_FAILURES):
            assert resumption.next_attempt(Failed(), progress) is not None
        accept(progress, tokens(position, [5], "a"))
    for _ in range(MAX_FAILURES):
        assert resumption.next_attempt(Failed(), progress) is not None
    assert resumption.next_attempt(Failed(), progress) is None


def test_resumption_makes_no_attempt_past_the_deadline():
    clock = Clock()
    resumption, progress = (
        Resumption(pb.GenerateRequest(), Routers(1), 10.0, clock=clock),
        Progress(1),
    )
    accept(progress)
    clock.now = 9.0
    assert resumption.next_attempt(Failed(), progress).timeout == 1.0
    clock.now = 9.99
    assert resumption.next_attempt(Failed(), progress) is None


def test_progress_counts_output_of_two_routers_once():
    progress = Progress(2)
    accept(progress, of(0, tokens(0, [5], "a")), of(0, tokens(0, [], "b")), of(1, finished()))
    progress.begin_call()
    # The second one does not know that the text and the ending had arrived.
    accept(progress, of(1, tokens(0, [], "x")), of(1, finished()))
    accept(progress, of(0, tokens(0, [], "b")), of(0, finished()))
    assert [c.text for c in progress.completions()] == ["ab", ""]
    assert progress.finished is not None


def test_progress_rejects_a_router_that_starts_over():
    progress = Progress(1)
    accept(progress, tokens(0, [5, 6], "He"))
    progress.begin_call()
    with pytest.raises(errors.InternalError, match="position 0, where 2 was next"):
        accept(progress, tokens(0, [5], "H"))


HALF = [accepted(), tokens(0, [5, 6], "Hel"), None]
REST = [accepted(), tokens(2, [7], "lo"), finished()]


def test_generation_resumes_on_another_router():
    dying, other = FakeRouter(), FakeRouter()
    dying.script, other.script = HALF, REST
    with running(other) as second:
        first_router = running(dying)
        with Client([first_router.__enter__(), second], timeout=10.0) as client:
            generation = client.generate("Hi", SamplingParams(max_tokens=3))
            assert next(generation).text == "Hel"
            first_router.__exit__(None, None, None)
            assert (generation.text(), generation.token_ids()) == ("Hello", [5, 6, 7])
            assert generation.num_resumed == 1
            (resumed,) = other.requests
            assert [list(s.ids) for s in resumed.continue_from] == [[5, 6]]
            # The one that answers is asked first from now on.
            assert client.tokenize("Hi").token_ids == (1, 2)
            assert len(other.requests) == 2


async def test_async_generation_resumes_on_another_router():
    dying, other = FakeRouter(), FakeRouter()
    dying.script, other.script = HALF, REST
    with running(other) as second:
        first_router = running(dying)
        async with AsyncClient([first_router.__enter__(), second], timeout=10.0) as client:
            generation = client.generate("Hi", SamplingParams(max_tokens=3))
            assert (await anext(generation)).text == "Hel"
            first_router.__exit__(None, None, None)
            assert await generation.text() == "Hello"
            assert generation.num_resumed == 1


def test_generation_fails_on_router_loss_with_resume_disabled():
    dying = FakeRouter()
    dying.script = HALF
    first_router = running(dying)
    with Client(first_router.__enter__(), timeout=10.0, resume=False) as client:
        generation = client.generate("Hi")
        next(generation)
        first_router.__exit__(None, None, None)
        with pytest.raises(errors.UnavailableError):
            generation.text()


async def test_closed_client_does_not_resume(router):
    router.script = HALF
    with running(router) as address:
        async with AsyncClient([address, address]) as client:
            generation = client.generate("Hi")
            await anext(generation)
        with pytest.raises(errors.CancelledError):
            await anext(generation)
        with Client([address, address]) as blocking:
            other = blocking.generate("Hi")
            next(other)
        with pytest.raises(errors.CancelledError):
            next(other)
    assert len(router.requests) == 2


@pytest.mark.parametrize("call", [lambda c: c.generate("Hi"), lambda c: c.get_model()])
async def test_closed_client_cancels_calls(address, call):
    blocking, client = Client(address), AsyncClient(address)
    blocking.close()
    with pytest.raises(errors.CancelledError, match="client is closed"):
        call(blocking)
    await client.close()
    with pytest.raises(errors.CancelledError, match="client is closed"):
        await call(client)


async def test_close_cancels_an_async_call_in_progress():
    client = AsyncClient(f"127.0.0.1:{free_port()}", wait_for_ready=True)
    pending_call = asyncio.create_task(client.get_model())
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(errors.CancelledError):
        await pending_call


async def test_close_ends_a_generation_that_looks_for_a_router():
    dying = FakeRouter()
    dying.script = HALF
    with running(dying) as address:
        client, blocking = AsyncClient(address), Client(address)
        generation, other = client.generate("Hi"), blocking.generate("Hi")
        await anext(generation)
        await asyncio.to_thread(next, other)
    reading = [asyncio.create_task(generation.text()), asyncio.to_thread(other.text)]
    ends = asyncio.gather(*reading, return_exceptions=True)
    await asyncio.sleep(0.5)  # pauses between two attempts are longer by now
    blocking.close()
    await client.close()
    assert [type(error) for error in await ends] == [errors.CancelledError] * 2


async def test_cancel_ends_a_generation_that_looks_for_a_router():
    dying = FakeRouter()
    dying.script = HALF
    first_router = running(dying)
    async with AsyncClient(first_router.__enter__(), timeout=10.0) as client:
        generation = client.generate("Hi")
        await anext(generation)
        first_router.__exit__(None, None, None)
        generation.cancel()
        with pytest.raises(errors.CancelledError):
            await generation.text()


def test_client_skips_an_unreachable_router(router, address):
    with Client([f"127.0.0.1:{free_port()}", address], timeout=10.0) as client:
        assert client.get_model().name == "tiny"
        assert client.generate("Hi").text() == "Hello"


def test_client_waits_for_the_first_of_several_routers(router):
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    with Client(addresses, timeout=10.0, wait_for_ready=True) as client:
        generation = client.generate("Hi")
        with running(router, ports[1]):
            assert generation.text() == "Hello"


def test_abort_finds_its_request_on_any_router(router, address):
    knows_nothing = FakeRouter()
    knows_nothing.known = ()
    with running(knows_nothing) as other, Client([other, address], timeout=10.0) as client:
        client.abort("r-1")
        with pytest.raises(errors.NotFoundError):
            client.abort("r-2")


def test_client_rejects_an_empty_address_list():
    with pytest.raises(errors.InvalidArgumentError, match="address"):
        Client([])
