"""Encode pool of a cluster that speaks TLS: images are answered, and certificates of other roles
are refused."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import grpc
import pytest

from baton import Client
from baton.cli.certs import LOCAL_HOSTS, Authority, write
from baton.cli.local.local_cluster import LocalCluster
from baton.serving.grpc.access import WORKER_NAME
from tests.support.cluster.image_questions import Question, num_inputs, question_of
from tests.support.router.images import save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

ENCODE, TRANSFER = "/baton.v1.Encode/Encode", "/baton.v1.EncoderTransfer/Fetch"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def secured(llava: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = Authority()
    roles = {role: authority.issue(role) for role in ("worker", "decode", "client", "admin")}
    router = authority.issue("router", hosts=LOCAL_HOSTS)
    write(folder, {"ca": authority.own, "router": router, **roles})
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
    with LocalCluster(
        llava,
        num_encode=1,
        worker_flags={**flags, "kv_connector": "grpc"},
        prefill_flags={"max_num_batched_tokens": 2},  # prompts wait, so images are sent elsewhere
        router_flags={"admission": "none"},
        tls_dir=folder,
    ) as cluster:
        yield cluster


def test_tls_cluster_answers_images_as_transformers(secured, llava):
    questions = [question_of(llava, seed) for seed in range(8)]
    with (
        Client(secured.address, tls=secured.tls.to_router()) as client,
        ThreadPoolExecutor(len(questions)) as pool,
    ):
        answers = list(pool.map(Question.ask, questions, repeat(client)))
    assert all(map(Question.is_answer, questions, answers))
    assert num_inputs(secured, "encode") > 0
    assert num_inputs(secured, "failed") == 0


@pytest.mark.parametrize(
    ("method", "role", "allowed"),
    [
        (ENCODE, "worker", "router"),
        (ENCODE, "decode", "router"),
        (ENCODE, "client", "router"),
        (TRANSFER, "router", "encode and prefill and decode and worker"),
        (TRANSFER, "client", "encode and prefill and decode and worker"),
    ],
)
def test_encode_worker_refuses_certificate_of_other_role(secured, method, role, allowed):
    code, details = refusal(secured, method, role)
    service = method.split("/")[1]
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == f"{service} is for {allowed}; the certificate shown is for {role}"


@pytest.mark.parametrize(("method", "role"), [(ENCODE, "router"), (TRANSFER, "decode")])
def test_encode_worker_takes_calls_of_the_right_role(secured, method, role):
    code, _ = refusal(secured, method, role)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, "an empty request is refused for itself"


def refusal(cluster: LocalCluster, method: str, role: str) -> tuple[grpc.StatusCode, str]:
    """Returns how an empty request under the certificate of a role is refused."""
    shown = cluster.tls.shown_by(role, WORKER_NAME)
    pem = [Path(path).read_bytes() for path in (shown.ca, shown.key, shown.cert)]
    credentials = grpc.ssl_channel_credentials(*pem)
    endpoint, options = cluster.process("encode-0").endpoint, shown.channel_options()
    with grpc.secure_channel(endpoint, credentials, options) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(method)(b"", timeout=30.0))
        return caught.value.code(), caught.value.details()
