"""Clusters that speak TLS everywhere: with certificates of roles, and with tokens for clients."""

import asyncio
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace as changed
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from baton import AsyncClient, Client, SamplingParams, Tls
from baton.cli.certs import Authority, write
from baton.cli.local.process import Process
from baton.cli.local.tls_folder import TlsFolder
from baton.cli.main import app
from baton.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from baton.models import locate
from baton.serving.grpc.access import WORKER_NAME
from tests.support.cluster.checkpoints import is_greedy
from tests.support.cluster.named_clusters import Secured, issued, tenants_file
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.serving.replacing import replace
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROMPTS = ["def main():", "import os\n", "class Queue:", "for line in open("]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def authority(secured_shape: Secured) -> Authority:
    return secured_shape.authority


def texts_of(address: str, tls: Tls | None) -> list[list[int]]:
    with Client(address, tls=tls, timeout=60.0) as client:
        return [client.generate(prompt, PARAMS).token_ids() for prompt in PROMPTS]


def test_tls_cluster_gives_the_tokens_of_transformers(secured):
    tls = secured.tls
    with Client(secured.address, tls=tls.to_router()) as client:
        for prompt in PROMPTS:
            token_ids = client.generate(prompt, PARAMS).token_ids()
            assert is_greedy(locate("tiny"), list(client.tokenize(prompt).token_ids), token_ids)
    with Client(secured.admin_address, tls=tls.to_router("admin")) as admin:
        workers = admin.list_workers()
        assert {worker.state for worker in workers} == {"ready"}
    moved = 0
    for worker in workers:
        with Client(worker.admin_endpoint, tls=tls.to_worker()) as client:
            moved += client.get_load().num_transferred_bytes
    assert moved > 0, "no block was handed over"


def test_tls_rejects_missing_and_wrong_certificates(secured):
    tls = secured.tls
    for nothing in (None, changed(tls.to_router(), cert=None, key=None)):
        with (
            Client(secured.address, tls=nothing, timeout=10.0) as client,
            pytest.raises(UnavailableError, match="wants TLS, a certificate, or another one"),
        ):
            client.get_model()
    with (
        Client(secured.admin_address, tls=tls.to_router("client"), timeout=10.0) as client,
        pytest.raises(PermissionDeniedError, match="Admin is for admin and router"),
    ):
        client.list_workers()
    with (
        Client(secured.address, tls=tls.to_router("worker"), timeout=10.0) as client,
        pytest.raises(PermissionDeniedError, match="Inference is for client and admin"),
    ):
        client.get_model()
    worker = secured.process("decode-0").endpoint
    for role, method in (
        ("client", "/baton.v1.Decode/Generate"),
        ("admin", "/baton.v1.KvSharing/Share"),
        ("worker", "/baton.v1.Decode/Generate"),
    ):
        shown = tls.shown_by(role, WORKER_NAME)
        pem = [Path(path).read_bytes() for path in (shown.ca, shown.key, shown.cert)]
        credentials = grpc.ssl_channel_credentials(*pem)
        with grpc.secure_channel(worker, credentials, shown.channel_options()) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream(method)(b"", timeout=10.0))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "is for router" in caught.value.details()


def test_https_authenticates_by_client_certificate(secured):
    tls = secured.tls
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    answers = {}
    for role in ("client", "client-acme", "worker"):
        context = ssl.create_default_context(cafile=tls.path / "ca.pem")
        context.load_cert_chain(tls.path / f"{role}.pem", tls.path / f"{role}.key")
        with httpx.Client(verify=context, timeout=30.0) as client:
            answers[role] = client.post(f"{secured.http_address}/v1/completions", json=body)
    assert answers["client"].status_code == answers["client-acme"].status_code == 200
    assert answers["client"].json()["choices"] == answers["client-acme"].json()["choices"]
    assert answers["worker"].status_code == 403
    assert "Inference is for client and admin" in answers["worker"].json()["error"]["message"]
    context = ssl.create_default_context(cafile=tls.path / "ca.pem")
    with httpx.Client(verify=context, timeout=10.0) as client, pytest.raises(httpx.TransportError):
        client.post(f"{secured.http_address}/v1/completions", json=body)


def test_commands_take_tls_options_and_variables(secured):
    tls = secured.tls.to_router("admin")
    files = {"BATON_TLS_CERT": tls.cert, "BATON_TLS_KEY": tls.key}
    runner = CliRunner(env={name: str(value) for name, value in files.items()})
    ca = ["--tls-ca", str(tls.ca), "--tls-server-name", "baton-router"]
    generated = runner.invoke(app, ["generate", "def f(", "--address", secured.address, *ca])
    assert generated.exit_code == 0, generated.stderr
    listed = runner.invoke(app, ["top", "--once", "--admin", secured.admin_address, *ca])
    assert "decode-1" in listed.stdout
    where = ["--admin", secured.admin_address, "--address", secured.address]
    examined = runner.invoke(app, ["doctor", *where, "--try", *ca])
    assert examined.exit_code == 0, examined.stdout
    assert "the certificate that expires first, in " in examined.stdout
    assert "decode-0: worker" in examined.stdout
    plain = CliRunner().invoke(app, ["workers", "--admin", secured.admin_address])
    assert plain.exit_code == 1
    assert "wants TLS" in plain.stderr


def keeps_earlier_files(process: Process) -> bool:
    """Returns whether a process has not loaded the files that it last found changed. Between two
    files of a replacement they do not belong together, which it says before it loads them all."""
    lines = [line for line in process.log_path.read_text().splitlines() if "watched_files" in line]
    return bool(lines) and "earlier content is kept" in lines[-1]


@pytest.mark.slow
async def test_certificate_rotation_under_load_loses_no_request(secured, authority):
    """Those that are replaced first expire, so that every new connection needs the new ones."""
    folder: TlsFolder = secured.tls
    is_over, num_done = False, 0
    expected = texts_of(secured.address, folder.to_router())
    async with AsyncClient(
        secured.address, tls=folder.to_router(), timeout=60.0, resume=False
    ) as client:

        async def ask(index: int) -> None:
            nonlocal num_done
            while not is_over:
                token_ids = await client.generate(PROMPTS[index], PARAMS).token_ids()
                assert token_ids == expected[index]
                num_done += 1

        tasks = [asyncio.create_task(ask(index)) for index in range(len(PROMPTS))]
        lifetime = timedelta(seconds=6)
        short = issued(authority, lifetime=lifetime)
        await asyncio.to_thread(replace, folder.path, **short)
        expiry = time.monotonic() + lifetime.total_seconds()
        await asyncio.sleep(2.5)  # each process looks for new files every second
        await asyncio.to_thread(replace, folder.path, **issued(authority))
        await asyncio.sleep(max(0.0, expiry - time.monotonic()) + 1.0)
        before = num_done
        await until(lambda: num_done > before + 2 * len(PROMPTS), what="answers")
        is_over = True
        await asyncio.gather(*tasks)
    # Every process has the new ones, and believes them of the others: also after a restart.
    secured.kill("decode-1")
    secured.restart("decode-1")
    secured.kill("prefill-1")
    secured.restart("prefill-1")
    assert texts_of(secured.address, folder.to_router()) == expected
    for process in secured.processes:
        assert not keeps_earlier_files(process), process.log_tail()


@pytest.fixture(scope="module")
def by_token(secured_shape: Secured, tmp_path_factory) -> Iterator[SecondRouter]:
    path = tenants_file(tmp_path_factory.mktemp("by-token"), {"open sesame": "acme"})
    flags = {"client_auth": "token", "tenants_file": path}
    with second_router(secured_shape.cluster, http=True, **flags) as running:
        yield running


def test_token_auth_needs_certificates_of_administrators_only(by_token):
    tls = changed(by_token.tls.to_router(), cert=None, key=None)
    with Client(by_token.address, tls=tls, token="open sesame", timeout=30.0) as client:
        assert client.generate(PROMPTS[0], PARAMS).text()
    for token in (None, "guessed"):
        with (
            Client(by_token.address, tls=tls, token=token, timeout=30.0) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.generate(PROMPTS[0], PARAMS).text()
    with (
        Client(by_token.admin_address, tls=tls, token="open sesame", timeout=5.0) as client,
        pytest.raises(UnavailableError, match="wants TLS, a certificate"),
    ):
        client.list_workers()
    with Client(by_token.admin_address, tls=by_token.tls.to_router("admin")) as admin:
        assert len(admin.list_workers()) == 4
        assert admin.list_requests() == []
        assert admin.explain(PROMPTS[0]).reason


def test_https_authenticates_by_token(by_token):
    context = ssl.create_default_context(cafile=by_token.tls.path / "ca.pem")
    url = f"{by_token.http_address}/v1/completions"
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    with httpx.Client(verify=context, timeout=30.0) as client:
        known = {"authorization": "Bearer open sesame"}
        assert client.post(url, json=body, headers=known).status_code == 200
        assert client.post(url, json=body).status_code == 401
        wrong = {"authorization": "Bearer guessed"}
        assert client.post(url, json=body, headers=wrong).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"))


@pytest.mark.slow
def test_https_shows_rotated_certificates(by_token, authority):
    folder = by_token.tls.path
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    url = f"{by_token.http_address}/health"

    def shown() -> str:
        with (
            httpx.Client(verify=context, timeout=10.0) as client,
            client.stream("GET", url) as answer,
        ):
            stream = answer.extensions["network_stream"]
            return stream.get_extra_info("ssl_object").getpeercert()["serialNumber"]

    before = shown()
    assert shown() == before
    replace(folder, **issued(authority))
    deadline = time.monotonic() + 10.0
    while shown() == before:
        assert time.monotonic() < deadline, "the former certificate is still shown"
        time.sleep(0.2)


@pytest.mark.parametrize(
    "process", ["router", pytest.param("decode-worker", marks=pytest.mark.nightly)]
)
def test_process_with_certificate_of_another_role_exits(process, tmp_path):
    authority = Authority()
    issues = {"router": authority.issue("worker"), "decode-worker": authority.issue("prefill")}
    write(tmp_path, {"ca": authority.own, "wrong": issues[process]})
    files = {"cert": "wrong.pem", "key": "wrong.key", "ca": "ca.pem"}
    flags = [f"--tls-{of}={tmp_path / file}" for of, file in files.items()]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "baton", process, "--redis-url=redis://127.0.0.1:1/0", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "this process needs one that is for a URI" in ended.stderr
    assert len(ended.stderr.splitlines()) == 2  # the first line of every process, and the error
