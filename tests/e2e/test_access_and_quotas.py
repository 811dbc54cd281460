"""Access to a router with tenants: tokens, quotas and rate limits, over gRPC and HTTP."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from typer.testing import CliRunner, Result

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from baton.client.client import AsyncClient, Client
from baton.errors import OverloadedError, UnauthenticatedError
from baton.sampling import SamplingParams
from baton.serving.tokens import new_token
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.cluster.scraped import scrape
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
DESCRIBED = ("asks-v1models", "asks-v1modelstiny", "asks-GetModel", "asks-ListModels")
TENANTS = ("few", "clumsy", "thrifty", "terse", "free", "fired", "flood", *DESCRIBED)
QUOTAS = """
few      requests_per_minute=1
clumsy   requests_per_minute=1
thrifty  tokens_per_minute=100
terse    bytes_per_minute=1500
flood    requests_per_minute=1
"""
QUOTAS += "".join(f"{tenant} requests_per_minute=1\n" for tenant in DESCRIBED)


class TenantFiles:
    """The files of a router with tenants, and who has a token for it."""

    def __init__(self, folder: Path) -> None:
        made = {tenant: new_token(tenant) for tenant in TENANTS}
        self.tokens = {tenant: token for tenant, (token, _) in made.items()}
        self._lines = {tenant: line for tenant, (_, line) in made.items()}
        self._file = folder / "tokens"
        self.write_tokens(*TENANTS)
        (folder / "quotas").write_text(QUOTAS)
        self.access_log = folder / "access.log"
        self.flags = {
            "tenants_file": self._file,
            "quotas": folder / "quotas",
            "access_log": self.access_log,
        }

    def write_tokens(self, *tenants: str) -> None:
        """Writes the tokens of these tenants alone."""
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{self._lines[tenant]}\n" for tenant in tenants))
        new.replace(self._file)


@pytest.fixture(scope="module")
def tenant_files(tmp_path_factory: pytest.TempPathFactory) -> TenantFiles:
    return TenantFiles(Path(tmp_path_factory.mktemp("door")))


@pytest.fixture(scope="module")
def guarded(tenant_files: TenantFiles, single_shape: LocalCluster) -> Iterator[SecondRouter]:
    with second_router(single_shape, http=True, **tenant_files.flags) as running:
        yield running


def client_of(cluster: SecondRouter, token: str | None) -> AsyncClient:
    return AsyncClient(cluster.address, admin_address=cluster.admin_address, token=token)


def http_of(cluster: SecondRouter, token: str) -> httpx.AsyncClient:
    bearing = {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=cluster.http_address, timeout=30, headers=bearing)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "def", "max_tokens": 4, **fields}


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_router_answers_401_without_a_valid_token(guarded, token):
    async with client_of(guarded, token) as client:
        calls = (
            client.generate("def", SHORT).text,
            lambda: client.tokenize("def"),
            client.get_model,
            client.list_requests,
            lambda: client.explain("def"),
            lambda: client.abort("any"),
        )
        for call in calls:
            with pytest.raises(UnauthenticatedError):
                await call()
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=guarded.http_address, headers=headers) as http:
        answers = [
            await http.post("/v1/completions", json=completion()),
            await http.post("/v1/chat/completions", json={"model": "tiny", "messages": []}),
            await http.get("/v1/models"),
            await http.get("/v1/models/tiny"),
            await http.get("/metrics"),
        ]
        assert (await http.get("/health")).status_code == 200
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def invoke(cluster: SecondRouter, *command: str, **variables: str) -> Result:
    admin = {"BATON_ADDRESS": cluster.address, "BATON_ADMIN_ADDRESS": cluster.admin_address}
    return CliRunner(env={**admin, **variables}).invoke(app, command)


@pytest.mark.parametrize("is_variable", [False, True], ids=["flag", "variable"])
@pytest.mark.parametrize(
    "command", [("explain", "def"), ("top", "--once"), ("flush", "def"), ("flush",)], ids=" ".join
)
def test_operators_commands_take_a_token(guarded, tenant_files, command, is_variable):
    token = tenant_files.tokens["free"]
    flag = () if is_variable else ("--token", token)
    variables = {"BATON_TOKEN": token} if is_variable else {}
    result = invoke(guarded, *command, *flag, **variables)
    assert result.exit_code == 0, result.stderr
    assert token not in result.output
    wrong = invoke(guarded, *command, "--token", "guessed")
    assert (wrong.exit_code, "not known here" in wrong.stderr) == (1, True)


def test_explain_finds_a_request_of_the_tokens_tenant(guarded, tenant_files):
    token = tenant_files.tokens["free"]
    with Client(guarded.address, token=token) as client:
        client.generate("def", SHORT, request_id="of-free").text()
    command = ("explain", "--request-id", "of-free")
    result = invoke(guarded, *command, "--token", token)
    assert "request of-free" in result.stdout, result.stderr
    other = invoke(guarded, *command, "--token", tenant_files.tokens["clumsy"])
    assert other.exit_code == 1


def test_operators_commands_need_a_token_for_tenants_alone(guarded):
    result = invoke(guarded, "top", "--once", "--interval", "0.2")
    assert result.exit_code == 0, result.stderr
    assert "decode-0" in result.stdout
    assert "requests: with --token" in " ".join(result.stdout.split())
    shown = json.loads(invoke(guarded, "top", "--once", "--interval", "0.2", "--json").stdout)
    assert (shown["requests"], shown["hides_requests"]) == ([], True)
    for command in (("explain", "def"), ("flush",), ("flush", "def"), ("generate", "def")):
        refused = invoke(guarded, *command)
        assert refused.exit_code == 1
        assert "give it with --token or BATON_TOKEN" in refused.stderr


async def test_revoked_token_is_rejected_without_a_restart(guarded, tenant_files):
    token = tenant_files.tokens["fired"]
    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        assert await client.generate("def", SHORT).text()
        assert (await http.get("/v1/models")).status_code == 200
        tenant_files.write_tokens(*(tenant for tenant in TENANTS if tenant != "fired"))
        async with asyncio.timeout(10.0):
            while (await http.get("/v1/models")).status_code == 200:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.1)
        with pytest.raises(UnauthenticatedError, match="not known here"):
            await client.generate("def", SHORT).text()
    async with client_of(guarded, tenant_files.tokens["free"]) as client:
        assert await client.generate("def", SHORT).text()


async def test_request_rate_limit_rejects_until_the_window_has_room(guarded, tenant_files):
    token = tenant_files.tokens["few"]
    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        answer = await http.post("/v1/completions", json=completion())
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        for call in (client.generate("def", SHORT).text, lambda: client.tokenize("def")):
            with pytest.raises(OverloadedError, match="1 requests in a minute") as caught:
                await call()
            assert 0 < caught.value.retry_after <= 60.0
        async with grpc.aio.insecure_channel(guarded.address) as channel:
            call = InferenceStub(channel).Generate(
                pb.GenerateRequest(text="def"), metadata=(("authorization", f"Bearer {token}"),)
            )
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await http.post("/v1/completions", json=completion())
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        url = f"{guarded.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as ai:
            with pytest.raises(openai.RateLimitError):
                await ai.completions.create(model="tiny", prompt="def", max_tokens=4)
    async with client_of(guarded, tenant_files.tokens["free"]) as client:
        assert await client.generate("def", SHORT).text()
    await until_nothing_is_held(guarded)


@pytest.mark.parametrize("route", ["/v1/models", "/v1/models/tiny", "GetModel", "ListModels"])
async def test_descriptions_of_models_count_towards_the_rate_limit(guarded, tenant_files, route):
    tenant = f"asks {route}".replace(" ", "-").replace("/", "")
    token = tenant_files.tokens[tenant]
    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        match route:
            case "GetModel":
                await client.get_model()
            case "ListModels":
                await client.list_models()
            case _:
                assert (await http.get(route)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 429
        with pytest.raises(OverloadedError, match="1 requests in a minute"):
            await client.get_model()


async def test_invalid_requests_count_towards_the_rate_limit(guarded, tenant_files):
    too_long = {"model": "tiny", "messages": [{"role": "user", "content": "a b " * 4000}]}
    async with http_of(guarded, tenant_files.tokens["clumsy"]) as http:
        codes = [(await http.post("/v1/chat/completions", json=too_long)).status_code for _ in "ab"]
    assert codes == [400, 429]


async def test_token_rate_limit_refunds_unused_tokens(guarded, tenant_files):
    ids = list(range(10, 50))
    async with client_of(guarded, tenant_files.tokens["thrifty"]) as client:
        # Of the sixty that it may come to, one; then of seventy.
        generation = client.generate(ids[:10], SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(generation)
        generation.cancel()
        await until_nothing_is_held(guarded)
        await client.generate(ids, SamplingParams(max_tokens=2, ignore_eos=True)).text()
        with pytest.raises(OverloadedError, match="100 tokens in a minute") as caught:
            await client.generate(ids, SamplingParams(max_tokens=50)).text()
        assert 0 < caught.value.retry_after < 60
    await until_nothing_is_held(guarded)


async def test_byte_rate_limit_rejects_until_the_window_has_room(guarded, tenant_files):
    token = tenant_files.tokens["terse"]
    long = {"model": "tiny", "prompt": "def " * 250, "max_tokens": 1}
    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        answer = await http.post("/v1/completions", json=long)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-bytes"] == "1500"
        answer = await http.post("/v1/completions", json=long)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        for call in (client.generate("def " * 250, SHORT).text, lambda: client.tokenize("a" * 999)):
            with pytest.raises(OverloadedError, match="1500 bytes in a minute") as caught:
                await call()
            assert 0 < caught.value.retry_after <= 60.0
    await until_nothing_is_held(guarded)


async def test_refused_calls_over_each_api_are_counted(guarded, tenant_files):
    token = tenant_files.tokens["flood"]

    def seen() -> tuple[float, float]:
        families = scrape(guarded.metrics_endpoints["router"])
        name, duration = "baton_requests_refused_total", "gen_ai_server_request_duration_seconds"
        refused = families[name].total(name, tenant="flood", reason="requests_per_minute")
        ended = families[duration].total(f"{duration}_count", error_type="RESOURCE_EXHAUSTED")
        return refused, ended

    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        assert (await http.post("/v1/completions", json=completion())).status_code == 200
        for body in (completion(), completion(stream=True)):
            assert (await http.post("/v1/completions", json=body)).status_code == 429
        for call in (client.generate("def", SHORT).text, lambda: client.tokenize("def")):
            with pytest.raises(OverloadedError):
                await call()
    await until(lambda: seen()[0] == 4)  # a scrape may be a second old
    assert seen()[1] >= 3  # without that to tokenize, which is no request to the model
    log = guarded.log()
    assert log.count("a call of tenant 'flood' was refused (requests_per_minute)") == 1
    assert token not in log


async def test_access_log_has_a_line_of_each_call(guarded, tenant_files):
    """After other tests: it has lines of their calls, too."""
    token, secret = tenant_files.tokens["free"], "def a_secret_name"
    async with client_of(guarded, token) as client, http_of(guarded, token) as http:
        await client.generate(secret, SHORT, request_id="over-grpc").text()
        answer = await http.post("/v1/completions", json=completion(prompt=secret, stream=True))
        await client.tokenize(secret)
    async with client_of(guarded, "guessed") as stranger:
        with pytest.raises(UnauthenticatedError):
            await stranger.generate(secret, SHORT, request_id="no-one").text()

    def lines() -> list[dict[str, Any]]:
        text = tenant_files.access_log.read_text()
        assert secret not in text
        assert token not in text
        return [json.loads(line) for line in text.splitlines()]

    await until(lambda: lines()[-1]["reason"] == "unauthenticated")
    generated, completed, tokenized, refused = lines()[-4:]
    assert (generated["api"], generated["method"], generated["status"]) == (
        "grpc",
        "Generate",
        "OK",
    )
    assert (generated["tenant"], generated["request_id"]) == ("free", "over-grpc")
    assert (generated["model"], generated["num_output_tokens"]) == ("tiny", 4)
    assert 0 < generated["first_token_seconds"] <= generated["seconds"]
    assert (completed["method"], completed["status"]) == ("POST /v1/completions", 200)
    assert completed["request_id"].startswith(answer.headers["x-request-id"])
    assert (tokenized["method"], tokenized["num_prompt_tokens"]) == ("Tokenize", 0)
    assert (refused["status"], refused["tenant"]) == ("UNAUTHENTICATED", "")


def test_tenant_metrics_name_tenants_of_the_file(guarded):
    families = scrape(guarded.metrics_endpoints["router"])
    for name in ("baton_tenant_requests_total", "baton_requests_refused_total"):
        labels = {dict(at)["tenant"] for _, at in families[name].samples}
        assert labels >= {"few", "clumsy", "thrifty", "terse", "free", "flood", "*"}
    name = "baton_tenant_output_tokens_total"
    assert families[name].total(name, tenant="free") > 0
