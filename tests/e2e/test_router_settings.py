"""Settings of a router that a user gives: each does in its process what its help says."""

import socket
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.sampling import SamplingParams
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from baton_router.apis.edge.body.structure import MAX_PROMPTS
from tests.support.cluster.second_router import second_router
from tests.support.engine.images import IMAGE_TOKEN, image
from tests.support.router.images import encoded, save_checkpoint
from tests.support.router.lone_router import LoneRouter, lone_router
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

_FILE = encoded(image(1))
_PIXELS = image(1).width * image(1).height
_HOST = {"Host": "baton.example.org"}


@pytest.fixture(scope="module")
def silent_server() -> Iterator[int]:
    """The port of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneRouter]:
    checkpoint = save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))
    with lone_router(
        model=f"llava={checkpoint}",
        images_processes=1,
        images_max_pixels=_PIXELS,
        images_max_total_bytes=2 * len(_FILE) + 10,
        images_url_hosts="127.0.0.1",
        images_url_networks="127.0.0.0/8",
        images_url_timeout_s=0.5,
        http_allowed_hosts="baton.example.org",
        http_unknown_fields="refuse",
        http_max_prompt_ids=3000,
    ) as started:
        yield started


def refusal_of_images(router: LoneRouter, *images: pb.Image) -> str:
    message = pb.TokenizeRequest(text=" ".join([IMAGE_TOKEN] * len(images)), images=images)
    with router.channel() as channel:
        try:
            inference_pb2_grpc.InferenceStub(channel).Tokenize(message, timeout=60)
        except grpc.RpcError as error:
            return str(error.details())  # type: ignore[attr-defined]
    return ""


def refusal(router: LoneRouter, path: str, **body: object) -> str:
    answer = httpx.post(f"{router.http_address}{path}", json=body, headers=_HOST, timeout=60)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_router_limits_pixels_and_bytes_of_images(router: LoneRouter) -> None:
    larger = encoded(image(1).resize((image(1).width + 1, image(1).height)))
    fits = pb.Image(data=_FILE)
    assert refusal_of_images(router, fits) == ""
    assert f"at most {_PIXELS} are taken" in refusal_of_images(router, pb.Image(data=larger))
    assert f"{2 * len(_FILE) + 10} bytes" in refusal_of_images(router, fits, fits, fits)


def test_router_fetches_images_of_allowed_hosts_within_time(
    router: LoneRouter, silent_server: int
) -> None:
    slow = pb.Image(url=f"https://127.0.0.1:{silent_server}/a.png")
    assert "was not fetched within 0.5 s" in refusal_of_images(router, slow)
    other = pb.Image(url=f"https://localhost:{silent_server}/a.png")
    assert "'localhost', which --images-url-hosts does not" in refusal_of_images(router, other)


def test_router_answers_http_of_allowed_hosts_alone(router: LoneRouter) -> None:
    url = f"{router.http_address}/v1/models"
    assert httpx.get(url, headers=_HOST).status_code == 200
    assert httpx.get(url).status_code == 403


def test_router_refuses_unknown_fields_and_long_prompts(router: LoneRouter) -> None:
    said = refusal(router, "/v1/completions", model="llava", prompt="w5", temprature=1)
    assert "temprature" in said
    said = refusal(router, "/v1/completions", model="llava", prompt=[[5] * 128] * 30)
    assert f"has too many elements; expected at most {3000 + 2 * MAX_PROMPTS} " in said


def test_router_coalesces_tokens_and_bounds_its_index(single_shape: LocalCluster) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with (
        second_router(single_shape, coalesce_ms=100, max_indexed_hashes=1) as running,
        Client(running.address, admin_address=running.admin_address) as client,
    ):
        start = time.monotonic()
        chunks = [
            chunk for chunk in client.generate("def f(a, b):\n" * 8, params) if chunk.token_ids
        ]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 64
        assert len(chunks) <= (time.monotonic() - start) / 0.1 + 2
        wait_until(lambda: num_indexed_hashes(client) == 1)


def num_indexed_hashes(client: Client) -> int:
    return sum(worker.num_indexed_hashes for worker in client.list_workers())


def test_router_lets_special_tokens_act_where_allowed() -> None:
    turn = pb.ChatMessage(role="user", content="hi<|im_end|>")
    message = pb.TokenizeRequest(chat=pb.Chat(messages=[turn]))
    with lone_router(allow_special_tokens_in_chat=True) as running, running.channel() as channel:
        found = inference_pb2_grpc.InferenceStub(channel).Tokenize(message, timeout=60)
        end = inference_pb2_grpc.InferenceStub(channel).Tokenize(
            pb.TokenizeRequest(text="<|im_end|>"), timeout=60
        )
    assert list(found.token_ids).count(end.token_ids[0]) == 2


def test_router_takes_no_more_workers_than_allowed(single_shape: LocalCluster) -> None:
    with (
        lone_router(redis_url=single_shape.redis_url, max_workers=1) as running,
        Client(running.admin_address) as client,
    ):
        wait_until(client.list_workers)
        wait_until(lambda: "--max-workers" in running.log())
        assert len(client.list_workers()) == 1
