"""Endpoint picker asked over gRPC by a client that plays Envoy's order of messages."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager, suppress
from functools import cache

import grpc
import psutil
import pytest

from baton.envoy import external_processor_pb2 as pb
from baton.envoy import external_processor_pb2_grpc as pb_grpc
from baton.envoy.processing_mode_pb2 import ProcessingMode
from baton.errors import FailedPreconditionError
from baton.models import locate
from baton_picker.metrics import PickerMetrics
from baton_picker.process import EndpointPickerServer, serve
from baton_picker.settings import PickerSettings
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.record.record_file import RecordFile, RecordLimits
from baton_router.routing.placement.record.record_format import RecordReader
from baton_router.routing.placement.record.recorder import Recorder
from baton_router.text.model_card import read_model_card
from tests.support.cluster.scraped import documented_metrics
from tests.support.gateway.model_servers import ModelServer, serving
from tests.support.gateway.picker_process import health_of
from tests.support.waiting import until

DESTINATION = "x-gateway-destination-endpoint"
LB = "envoy.lb"
LONG = "def common(prefix):\n    return prefix\n\n\n" * 40
MODES = ProcessingMode.BodySendMode
RULES = Rules(no_handoff=True)


@cache
def card():
    return read_model_card(locate("tiny"))


@pytest.fixture(scope="module")
def servers():
    with serving(ModelServer()) as one, serving(ModelServer()) as two:
        yield one.address, two.address


@asynccontextmanager
async def picking(rules=RULES, recorder=None, **settings):
    """An endpoint picker, and a stub of its service."""
    given = PickerSettings(**{"port": 0, "probe_interval_s": 0.1, **settings})
    running = EndpointPickerServer(given, rules, card(), recorder)
    port = await running.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield running, pb_grpc.ExternalProcessorStub(channel)
    finally:
        await running.stop()


def request_headers(subset=None, modes=None, is_end=False, **headers):
    """The first message about a request."""
    given = {"content-type": "application/json", **headers}
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=is_end))
    for key, value in given.items():
        message.request_headers.headers.headers.add(
            key=key.replace("_", "-"), raw_value=value.encode()
        )
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({f"{DESTINATION}-subset": subset})
    if modes is not None:
        message.protocol_config.request_body_mode = modes[0]
        message.protocol_config.response_body_mode = modes[1]
    return message


def request_body(body, is_end=True):
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=is_end))


def response_headers(status="200", served=None, is_end=False):
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=is_end))
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if served is not None:
        message.metadata_context.filter_metadata[LB].update({f"{DESTINATION}-served": served})
    return message


def response_body(body, is_end=True):
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=is_end))


def completion(prompt, **fields):
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


async def exchanged(stub, *messages):
    """All answers to these messages, until the picker or the client ends the stream."""
    return [answer async for answer in stub.Process(iter(messages))]


def destination(answer):
    """The endpoint in an answer, whose header and metadata have to agree."""
    kind = answer.WhichOneof("response")
    (option,) = getattr(answer, kind).response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
    named = option.header.raw_value.decode()
    assert answer.dynamic_metadata[LB][DESTINATION] == named
    return named


async def picked_for(stub, prompt, subset, **fields):
    answers = await exchanged(
        stub, request_headers(subset), request_body(completion(prompt, **fields))
    )
    return destination(answers[0])


async def test_picker_refuses_chat_template_that_cannot_be_read(tmp_path):
    settings = PickerSettings(port=0, chat_template=str(tmp_path / "own.jinja"))
    with pytest.raises(FailedPreconditionError, match="cannot read the chat template"):
        await serve(settings)


async def test_picker_answers_headers_after_the_whole_body(servers):
    async with picking() as (_, stub):
        body = completion(LONG * 40)
        call = stub.Process()
        await call.write(request_headers(servers))
        half = len(body) // 2
        await call.write(request_body(body[:half], is_end=False))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first := asyncio.ensure_future(call.read())), 0.1)
        await call.write(request_body(body[half:]))
        assert destination(await first) in servers
        chunks = []
        while not chunks or not chunks[-1].end_of_stream:
            answer = await call.read()
            chunks.append(answer.request_body.response.body_mutation.streamed_response)
        assert b"".join(chunk.body for chunk in chunks) == body
        assert max(len(chunk.body) for chunk in chunks) <= 64_000
        call.cancel()


async def test_picker_streams_a_body_that_ends_with_trailers(servers):
    async with picking() as (_, stub):
        trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
        body = completion("hello")
        answers = await exchanged(
            stub, request_headers(servers), request_body(body, is_end=False), trailers
        )
        kinds = [answer.WhichOneof("response") for answer in answers]
        assert kinds == ["request_headers", "request_body", "request_trailers"]
        streamed = answers[1].request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (body, False)


async def test_picker_names_the_endpoint_in_the_buffered_body(servers):
    async with picking() as (_, stub):
        modes = MODES.BUFFERED, MODES.NONE
        headers, body = await exchanged(
            stub, request_headers(servers, modes), request_body(completion("hello"))
        )
        assert headers == pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        assert body.WhichOneof("response") == "request_body"
        assert destination(body) in servers


@pytest.mark.parametrize("mode", [MODES.STREAMED, MODES.NONE])
async def test_picker_picks_by_load_where_bodies_come_late(servers, mode):
    async with picking() as (_, stub):
        chunk = request_body(b'{"model"', is_end=False)
        first, second = await exchanged(stub, request_headers(servers, (mode, mode)), chunk)
        assert destination(first) in servers
        assert second == pb.ProcessingResponse(request_body=pb.BodyResponse())


async def test_picker_passes_on_bodies_that_it_cannot_read(servers):
    async with picking() as (running, stub):
        for headers in ({"content_encoding": "gzip"}, {"content_type": "text/plain"}):
            first, body = await exchanged(
                stub, request_headers(servers, **headers), request_body(b"\x1f\x8b")
            )
            assert destination(first) in servers
            assert body.request_body.response.body_mutation.streamed_response.body == b"\x1f\x8b"
        assert running.picker.num_prompt_tokens == 0


async def test_picker_places_a_partial_body_by_load(servers):
    async with picking() as (_, stub):
        modes = MODES.BUFFERED_PARTIAL, MODES.NONE
        part = request_body(b'{"model": "m", "prompt": "a', is_end=False)
        _, body = await exchanged(stub, request_headers(servers, modes), part)
        assert destination(body) in servers


async def test_picker_keeps_prefixes_of_models_and_salts_apart(servers):
    async with picking() as (running, stub):
        for fields in ({}, {"model": "n"}, {"cache_salt": "s"}):
            before = running.picker.num_cached_tokens
            await picked_for(stub, LONG, servers, **fields)
            assert running.picker.num_cached_tokens == before, fields
        await picked_for(stub, LONG, servers)
        assert running.picker.num_cached_tokens > 0


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "stranger", "content": 5}, "no message", LONG]},
        {"messages": [{"role": "user", "content": LONG}], "tools": [{"type": "function"}]},
        {"prompt": [7] * 400},
        {"prompt": [LONG, LONG]},
        {"prompt": [[7] * 400, [8, "mixed", None]]},
        {"input": LONG},
        {"prompt": LONG + "\ud800"},
    ],
    ids=range(9),
)
async def test_picker_finds_the_prefix_of_any_kind_of_prompt(servers, body):
    async with picking() as (running, stub):
        message = request_body(json.dumps({"model": "m", **body}).encode())
        for _ in range(2):
            answers = await exchanged(stub, request_headers(servers), message)
            assert destination(answers[0]) in servers
        assert running.picker.num_cached_tokens > 100


async def test_picker_counts_requests_until_their_answer_ends(servers):
    async with picking() as (running, stub):
        call = stub.Process()
        await call.write(request_headers(servers))
        await call.write(request_body(completion(LONG)))
        address = destination(await call.read())
        load = running.endpoints.get(address).load
        assert (load.num_sequences, load.num_queued_tokens > 100) == (1, True)
        await call.write(response_headers(served=address))
        await call.write(response_body(b"data: 1", is_end=False))
        await until(lambda: load.num_queued_tokens == 0)
        assert load.num_sequences == 1
        await call.write(response_body(b""))
        await until(lambda: load.num_sequences == 0)
        await call.done_writing()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_picker_frees_all_when_envoy_ends_the_stream(servers, is_cancelled):
    async with picking() as (running, stub):
        for body, is_end in ((b'{"prompt": "a', False), (completion(LONG), True)):
            call = stub.Process()
            await call.write(request_headers(servers))
            await call.write(request_body(body, is_end=is_end))
            await until(lambda: running.held.num_bytes or running.picker.num_results["picked"])
            if is_cancelled:
                call.cancel()
            else:
                await call.done_writing()
            await until(lambda: running.service.num_streams == 0)
            assert running.held.num_bytes == 0
            assert not any(one.load.num_sequences for one in running.endpoints.all)


async def test_picker_learns_from_the_endpoint_that_served(servers):
    async with picking() as (running, stub):
        call = stub.Process()
        await call.write(request_headers(servers))
        await call.write(request_body(completion(LONG)))
        first = destination(await call.read())
        (other,) = set(servers) - {first}
        await call.write(response_headers(served=other))
        await until(lambda: running.endpoints.get(other).load.num_sequences == 1)
        assert running.endpoints.get(first).load.num_sequences == 0
        await call.done_writing()
        await until(lambda: running.service.num_streams == 0)
        assert await picked_for(stub, LONG, [other]) == other
        assert running.picker.num_cached_tokens > 100


async def test_picker_ignores_an_unknown_endpoint_that_served(servers):
    async with picking() as (running, stub):
        messages = request_headers(servers), request_body(completion("hello"))
        answers = await exchanged(stub, *messages, response_headers(served="10.9.9.9:1"))
        assert len(answers) == 3
        assert {one.address for one in running.endpoints.all} == set(servers)


async def test_picker_avoids_an_endpoint_after_three_failures(servers):
    async with picking(endpoints=",".join(servers), probe_interval_s=60) as (running, stub):
        first = await picked_for(stub, LONG, None)
        for _ in range(3):
            await exchanged(
                stub, request_headers(), request_body(completion(LONG)), response_headers("503")
            )
        assert await picked_for(stub, LONG, None) != first
        assert not running.endpoints.get(first).circuit.is_closed


async def test_picker_names_fallbacks_in_order_of_cost(servers):
    async with picking(max_endpoints=5) as (_, stub):
        first = await picked_for(stub, LONG, servers)
        assert set(first.split(",")) == set(servers)
        assert await picked_for(stub, LONG, servers) == first


async def test_picker_sends_requests_away_from_queues():
    metrics = 'vllm:num_requests_waiting{engine="0"} 40.0\nvllm:num_requests_waiting_other 5\n'
    with serving(ModelServer(metrics=metrics)) as busy, serving(ModelServer()) as idle:
        names = f"{busy.address},{idle.address}"
        async with picking(endpoints=names) as (running, stub):
            assert running.endpoints.get(busy.address).num_waiting_elsewhere == 40
            for name in range(6):
                assert await picked_for(stub, f"{name}" + LONG, None) == idle.address


async def test_picker_avoids_endpoints_with_a_full_kv_cache():
    with serving(ModelServer(metrics="full 1.0\n")) as full, serving(ModelServer()) as empty:
        names = f"{full.address},{empty.address}"
        async with picking(endpoints=names, kv_metric="full") as (_, stub):
            for name in range(6):
                assert await picked_for(stub, f"{name}" + LONG, None) == empty.address


@pytest.mark.parametrize(("path", "num_waiting"), [("/metrics", 7), ("", 0)])
async def test_picker_reads_metrics_at_the_path_given(path, num_waiting):
    settings = {"endpoint_metrics_path": path, "waiting_metric": "busy"}
    with serving(ModelServer(metrics="busy 7\n")) as server:
        async with picking(endpoints=server.address, **settings) as (running, stub):
            assert await picked_for(stub, LONG, None) == server.address
            assert running.endpoints.get(server.address).num_waiting_elsewhere == num_waiting


async def test_picker_remembers_no_more_hashes_than_allowed(servers):
    async with picking(max_indexed_hashes=1) as (running, stub):
        first = await picked_for(stub, LONG, servers)
        assert await picked_for(stub, LONG, [first.partition(",")[0]])
        assert running.picker.num_cached_tokens <= 16


async def test_picker_ignores_metrics_that_are_none():
    metrics = "vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc +Inf\n"
    for text in (metrics, "vllm:num_requests_waiting {{{\n", "<html>"):
        with serving(ModelServer(metrics=text)) as server:
            async with picking(endpoints=server.address) as (_, stub):
                assert await picked_for(stub, LONG, None) == server.address


@pytest.mark.parametrize("policy", ["prefix-only", "least-loaded", "round-robin"])
async def test_picker_picks_by_every_placement_policy(servers, policy):
    async with picking(rules=Rules(policy, no_handoff=True)) as (_, stub):
        picked = [await picked_for(stub, LONG, servers) for _ in range(4)]
        assert set(picked) <= set(servers)
        assert policy != "round-robin" or set(Counter(picked).values()) == {2}


async def test_draining_picker_moves_gateways_to_other_connections(servers):
    """A gateway keeps one connection for all its requests; one under way ends on it."""

    def connections(port):
        ours = psutil.Process().net_connections("tcp")
        return {c.laddr for c in ours if c.raddr and c.raddr.port == port}

    async with picking() as (running, stub):
        late = stub.Process()
        await late.write(request_headers(servers))
        await picked_for(stub, LONG, servers)
        port = running.server.port
        (first,) = connections(port)
        running.server.begin_drain()
        async with asyncio.timeout(5.0):
            while not connections(port) - {first}:
                with suppress(grpc.aio.AioRpcError):  # CANCELLED, if it was on its way just then
                    await picked_for(stub, LONG, servers)
        assert await picked_for(stub, LONG, servers) in servers
        await late.write(request_body(completion(LONG)))
        assert destination(await late.read()) in servers
        late.cancel()


async def test_picker_metrics_are_exactly_the_documented_ones(servers):
    async with picking() as (running, stub):
        await picked_for(stub, LONG, servers)
        collector = PickerMetrics(running.picker, running.service, running.held)
        served = {
            sample.name: ("picker", metric.type, set(sample.labels), metric.documentation)
            for metric in collector.collect()
            for sample in metric.samples
        }
    rows = documented_metrics().items()
    assert {name: row for name, row in rows if row[0] == "picker"} == served


async def test_picker_records_decisions_for_replay(servers, tmp_path):
    recorder = Recorder(RecordFile(tmp_path / "r", RecordLimits(files=2)), RULES)
    recorder.start()
    async with picking(recorder=recorder) as (_, stub):
        picked = [await picked_for(stub, LONG, servers) for _ in range(3)]
    recorder.stop()
    reader = RecordReader()
    read = [reader.read(line) for line in (tmp_path / "r").read_bytes().splitlines()]
    decided = [one for one in read if one is not None]
    assert [one.decode for one in decided] == picked
    assert [one.rules.decide(one.inputs).decode for one in decided] == picked
    assert b"common" not in (tmp_path / "r").read_bytes()


# Bounds.


async def refused(stub, *messages):
    """The status and the code of the answer in place of a model server's."""
    *_, last = await exchanged(stub, *messages)
    assert last.WhichOneof("response") == "immediate_response"
    body = json.loads(last.immediate_response.body)
    return last.immediate_response.status.code, body["error"]["code"]


async def test_picker_answers_408_if_a_body_stops(servers):
    async with picking(body_timeout_s=0.2) as (running, stub):
        call = stub.Process()
        await call.write(request_headers(servers))
        for _ in range(3):
            await call.write(request_body(b" ", is_end=False))
            await asyncio.sleep(0.05)
        answer = await call.read()
        assert answer.immediate_response.status.code == 408
        assert await call.code() == grpc.StatusCode.OK
        assert running.held.num_bytes == 0


async def test_picker_closes_streams_that_are_silent(servers):
    async with picking(default_timeout_s=0.2) as (running, stub):
        call = stub.Process()
        await call.write(request_headers(servers, is_end=True))
        assert destination(await call.read())
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        assert running.service.num_streams == 0


async def test_picker_answers_429_beyond_its_streams(servers):
    async with picking(max_streams=1) as (_, stub):
        call = stub.Process()
        await call.write(request_headers(servers, is_end=True))
        await call.read()
        assert await refused(stub, request_headers(servers)) == (429, "rate_limit_exceeded")
        call.cancel()


async def test_picker_sheds_load_where_all_endpoints_are_at_the_limit(servers):
    async with picking(max_in_flight=1) as (_, stub):
        calls = [stub.Process() for _ in servers]
        picked = set()
        for call in calls:
            await call.write(request_headers(servers, is_end=True))
            picked.add(destination(await call.read()))
        assert picked == set(servers)
        (answer,) = await exchanged(stub, request_headers(servers, is_end=True))
        headers = answer.immediate_response.headers.set_headers
        assert {one.header.key: one.header.raw_value for one in headers}["Retry-After"] == b"1"
        assert answer.immediate_response.status.code == 429
        await calls[0].done_writing()
        assert await calls[0].read() is grpc.aio.EOF
        assert await picked_for(stub, "a", servers) in servers
        calls[1].cancel()


async def test_picker_answers_429_beyond_its_held_bytes(servers):
    async with picking(max_held_bytes=1024, max_body_bytes=2048) as (running, stub):
        call = stub.Process()
        await call.write(request_headers(servers))
        await call.write(request_body(b" " * 1000, is_end=False))
        await until(lambda: running.held.num_bytes == 1000)
        over = request_headers(servers), request_body(b" " * 100)
        assert await refused(stub, *over) == (429, "rate_limit_exceeded")
        call.cancel()
        await until(lambda: running.held.num_bytes == 0)


async def test_picker_refuses_an_announced_large_body_at_once(servers):
    async with picking(max_body_bytes=1024) as (_, stub):
        large = request_headers(servers, content_length="1025")
        assert await refused(stub, large) == (413, "body_too_large")


async def test_picker_forgets_the_oldest_prefixes_of_an_endpoint(servers):
    async with picking(cache_tokens=160) as (running, stub):
        for name in range(5):
            await picked_for(stub, f"{name}" + LONG, servers[:1])
        endpoint = running.endpoints.get(servers[0])
        assert len(endpoint.blocks) == running.endpoints.index.num_hashes(servers[0]) == 10


async def test_picker_keeps_other_requests_going_beside_hostile_ones(servers):
    async with picking() as (_, stub):
        hostile = [
            exchanged(stub, request_headers(servers), request_body(body))
            for body in (
                b"[" * 2**20,
                b"[1" + b",1" * 3_900_000,
                b'{"prompt": [1' + b",1" * 500_000,
            )
        ]
        ended = asyncio.gather(*hostile)
        assert await picked_for(stub, "hello", servers) in servers
        deep, large, cut = await ended
        assert deep[-1].immediate_response.status.code == 400
        assert destination(large[0]) in servers
        assert cut[-1].immediate_response.status.code == 400


async def test_picker_reads_large_bodies_as_bytes(servers):
    async with picking() as (running, stub):
        image = "A" * 3_000_000
        for question in ("one", "two"):
            await picked_for(stub, image + question, servers)
        assert running.picker.num_cached_tokens > 10_000
        assert running.picker.num_prompt_tokens < 40_000


# Malformed messages.


WRONG = {
    "body first": [request_body(b"{}")],
    "nothing set": [pb.ProcessingRequest()],
    "headers twice": [request_headers(["127.0.0.1:1"])] * 2,
    "body after its end": [
        request_headers(["127.0.0.1:1"]), *[request_body(completion("a"))] * 2
    ],
    "gRPC mode": [request_headers(["127.0.0.1:1"], (MODES.GRPC, MODES.NONE))],
    "subset is a number": [request_headers(1)],
    "subset of names": [request_headers(["localhost:80"])],
    "subset of numbers": [request_headers([1, 2])],
    "subset of large ports": [request_headers(["127.0.0.1:65536"])],
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_picker_ends_streams_of_malformed_messages(case):
    async with picking() as (running, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchanged(stub, *WRONG[case])
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "expected" in caught.value.details() or "after" in caught.value.details()
        assert running.service.num_streams == 0


async def test_picker_ends_streams_of_bytes_that_are_no_message():
    async with (
        picking() as (running, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}") as channel,
    ):
        method = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
        call = channel.stream_stream(method)(iter([b"\xff\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert running.service.num_streams == 0


async def test_picker_ends_streams_in_observability_mode(servers):
    async with picking() as (_, stub):
        message = request_headers(servers)
        message.observability_mode = True
        assert await exchanged(stub, message) == []


async def test_picker_reports_health_by_the_names_of_the_protocol():
    async with picking() as (running, _):
        address = f"127.0.0.1:{running.server.port}"
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        for name in ("liveness", "readiness", service, "inference-extension"):
            assert await asyncio.to_thread(health_of, address, name)


@pytest.mark.parametrize("is_configured", [False, True])
@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        ("{0},{1}", {0, 1}),
        (" {1} ,", {1}),
        (["{0},{1}"], {0, 1}),
        (["{1}", ""], {1}),
        ("127.0.0.1", {0, 1}),
        (["127.0.0.1"], {0, 1}),
        (["127.0.0.2", "{0}"], {0}),
        ("", set()),
        ([""], set()),
        ([], set()),
        ("127.0.0.2", set()),
        ("::1", set()),
        ("[::1]", set()),
    ],
)
async def test_picker_takes_subset_hint_in_every_form(servers, is_configured, form, numbers):
    def filled(text):
        return text.format(*servers)

    subset = filled(form) if isinstance(form, str) else list(map(filled, form))
    async with picking(endpoints=",".join(servers) if is_configured else "") as (_, stub):
        for server in servers:  # so that they are known
            await picked_for(stub, "a", [server])
        body = request_body(completion("a"))
        answers = [await exchanged(stub, request_headers(subset), body) for _ in range(6)]
    if not numbers:
        assert {answer[0].immediate_response.status.code for answer in answers} == {503}
    else:
        assert {destination(answer[0]) for answer in answers} <= {servers[i] for i in numbers}


async def test_picker_takes_ipv6_endpoints(servers):
    async with picking() as (_, stub):
        assert await picked_for(stub, "a", ["[0:0::1]:9003"]) == "[::1]:9003"


async def test_picker_resolves_names_of_model_servers(servers):
    port = servers[0].rpartition(":")[2]
    async with picking(endpoints=f"localhost:{port}") as (running, stub):
        assert servers[0] in {one.address for one in running.endpoints.all}
        assert await picked_for(stub, "a", None) == servers[0]


async def test_picker_starts_with_an_endpoint_that_is_no_dns_name(servers):
    async with picking(endpoints=f"a..b:80,{servers[0]}") as (_, stub):
        assert await picked_for(stub, "a", None) == servers[0]
