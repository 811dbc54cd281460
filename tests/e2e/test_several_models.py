"""Two models of different weights behind one router, each with workers of its own."""

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from baton import Client, SamplingParams
from baton.cli.main import app
from baton.client.types import Worker
from baton.errors import DeadlineExceededError, NotFoundError, UnavailableError
from tests.support.cluster.checkpoints import greedy, prompt_of, save_checkpoint
from tests.support.cluster.scraped import scrape
from tests.support.cluster.two_models import TwoModels, two_models
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
FAMILIES = {"one": "llama", "two": "qwen3"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two checkpoints with one tokenizer, by the names under which they are served."""
    folders = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        save_checkpoint(family, folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="module")
def aliases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("aliases") / "aliases.toml"
    file.write_text('plain = "two"\ncanary = { one = 70, two = 30 }\n')
    return file


@pytest.fixture(scope="module")
def models(
    folders: dict[str, str], aliases: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoModels]:
    first, second = (f"{name}={folder}" for name, folder in folders.items())
    folder = tmp_path_factory.mktemp("logs")
    with two_models(first, second, folder, model_aliases=str(aliases)) as running:
        yield running


@pytest.fixture
def client(models: TwoModels) -> Iterator[Client]:
    with Client(models.cluster.address, admin_address=models.cluster.admin_address) as client:
        yield client


def model_of(client: Client, prompt: list[int], request_id: str, alias: str) -> str:
    """The model that answers a request of an alias."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    generation = client.generate(prompt, params, model=alias, request_id=request_id)
    generation.token_ids()
    assert generation.accepted is not None
    return generation.accepted.model


def test_two_models_answer_as_transformers_never_mixed(
    models: TwoModels, folders: dict[str, str], client: Client
) -> None:
    """Many at once, of prompts that both get, so that a mixed block or worker would show."""
    prompts = [prompt_of(length) for length in (9, 20, 40, 70)]
    cases = [(name, prompt) for prompt in prompts for name in folders] * 2

    def answer(case: tuple[str, list[int]]) -> list[int]:
        name, prompt = case
        return client.generate(prompt, GREEDY, model=name).token_ids()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, cases))
    for (name, prompt), tokens in zip(cases, answers, strict=True):
        assert tokens == greedy(folders[name], prompt, 12)
    assert greedy(folders["one"], prompts[0], 12) != greedy(folders["two"], prompts[0], 12)


def test_request_without_a_model_goes_to_the_first(
    models: TwoModels, folders: dict[str, str], client: Client
) -> None:
    prompt = prompt_of(11)
    assert client.generate(prompt, GREEDY).token_ids() == greedy(folders["one"], prompt, 12)


def test_model_is_found_by_its_folder(
    models: TwoModels, folders: dict[str, str], client: Client
) -> None:
    """As clients of other servers name a model: by what it was started with."""
    url = models.cluster.process("router").http_address
    turns = [{"role": "user", "content": "a"}]
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": turns, "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": turns, "max_tokens": 1},
    }
    for name, folder in folders.items():
        for given in (folder, f"{folder}/"):
            assert model_of(client, [5, 6], "by-folder", given) == name
            assert client.get_model(given).name == name
            assert httpx.get(f"{url}/v1/models/{given}").json()["id"] == name
            for path, body in bodies.items():
                answer = httpx.post(f"{url}{path}", json={**body, "model": given}).json()
                assert answer["model"] == name, (path, answer)


def test_models_are_listed_with_aliases_over_grpc_and_http(
    models: TwoModels, client: Client
) -> None:
    found = client.list_models()
    assert [(model.name, model.has_workers) for model in found.models] == [
        ("one", True),
        ("two", True),
    ]
    assert found.aliases == {"plain": {"two": 1.0}, "canary": {"one": 70.0, "two": 30.0}}
    assert client.get_model("two").architecture == "Qwen3ForCausalLM"
    assert client.get_model("plain").name == "two"
    url = models.cluster.process("router").http_address
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["one", "two", "canary", "plain"]
    assert httpx.get(f"{url}/v1/models/plain").json()["alias_of"] == {"two": 1.0}


def test_unknown_model_is_not_found_and_lists_those_there_are(
    models: TwoModels, client: Client
) -> None:
    listed = "'one', 'two', 'plain', 'canary'"
    with pytest.raises(NotFoundError, match=listed):
        client.generate([5, 6], GREEDY, model="three").token_ids()
    with pytest.raises(NotFoundError, match=listed):
        client.tokenize("a", model="three")
    url = models.cluster.process("router").http_address
    answer = httpx.post(f"{url}/v1/completions", json={"model": "three", "prompt": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert listed in error["message"]
    assert httpx.get(f"{url}/v1/models/three").status_code == 404


def test_answer_to_an_alias_names_the_real_model(models: TwoModels, client: Client) -> None:
    url = models.cluster.process("router").http_address
    body = {"model": "plain", "prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=body).json()["model"] == "two"
    assert model_of(client, [5, 6], "r-1", "plain") == "two"


def test_weighted_alias_draws_by_request_id_alone(models: TwoModels, client: Client) -> None:
    ids = [f"request-{number}" for number in range(20)]
    first = [model_of(client, [5, 6], request_id, "canary") for request_id in ids]
    again = [model_of(client, [7, 8, 9], request_id, "canary") for request_id in ids]
    assert first == again
    assert Counter(first) == {"one": 12, "two": 8}


def test_workers_requests_and_metrics_name_their_model(models: TwoModels, client: Client) -> None:
    def named(worker: Worker) -> tuple[str, str]:
        return worker.role, worker.model

    assert sorted(map(named, client.list_workers())) == [
        ("decode", "one"),
        ("decode", "two"),
        ("prefill", "one"),
        ("prefill", "two"),
    ]
    assert client.explain([5, 6], model="two").model == "two"
    assert client.role_balance("two").model == "two"
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    generation = client.generate([5, 6], long, model="plain")
    next(iter(generation))
    assert [one.model for one in client.list_requests()] == ["two"]
    generation.cancel()
    router = models.cluster.process("router").metrics_endpoint
    assert router is not None
    families = scrape(router)
    for model in FAMILIES:
        labels = {"model": model, "role": "decode", "state": "ready"}
        assert families["baton_workers"].total("baton_workers", **labels) == 1
        assert families["baton_output_tokens_total"].total("baton_output_tokens_total", model=model)


def test_role_command_shows_each_model(models: TwoModels, folders: dict[str, str]) -> None:
    address = ["--admin", models.cluster.admin_address]
    shown = CliRunner().invoke(app, ["role", *address])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line in folders] == list(folders)
    assert sum(line.startswith("pressure: ") for line in lines) == 2
    as_json = CliRunner().invoke(app, ["role", "--json", *address])
    assert [json.loads(line)["model"] for line in as_json.stdout.splitlines()] == list(folders)


def test_changed_alias_file_takes_effect_and_broken_one_does_not(
    models: TwoModels, aliases: Path, client: Client
) -> None:
    before = aliases.read_text()
    try:
        aliases.write_text('fresh = "one"\n')
        wait_until(lambda: "fresh" in client.list_models().aliases, within=10.0, what="a reload")
        assert model_of(client, [5, 6], "r-2", "fresh") == "one"
        aliases.write_text('fresh = "three"\n')
        time.sleep(2.5)
        assert client.list_models().aliases == {"fresh": {"one": 1.0}}
        log = models.cluster.process("router").log_path.read_text()
        assert log.count("reload failed; earlier content is kept") == 1
    finally:
        aliases.write_text(before)
    wait_until(lambda: "plain" in client.list_models().aliases, within=10.0, what="a reload")


def test_model_without_workers_fails_while_the_other_serves(
    models: TwoModels, folders: dict[str, str], client: Client
) -> None:
    prompt = prompt_of(13)
    for process in models.others:
        process.signal(signal.SIGKILL)
    wait_until(lambda: models.num_ready("two") == 0, within=30.0, what="the loss")
    with pytest.raises((UnavailableError, DeadlineExceededError)):
        client.generate(prompt, GREEDY, model="two", timeout=3.0).token_ids()
    expected = greedy(folders["one"], prompt, 12)
    assert client.generate(prompt, GREEDY, model="one").token_ids() == expected
    assert [model.has_workers for model in client.list_models().models] == [True, False]
    url = models.cluster.process("router").http_address
    assert httpx.get(f"{url}/health").status_code == 200
    for process in models.others:
        process.start(process.log_path.parent)
    wait_until(lambda: models.num_ready("two") == 2, within=60.0, what="the return")
    expected = greedy(folders["two"], prompt, 12)
    assert client.generate(prompt, GREEDY, model="two").token_ids() == expected
