"""Every way of choosing tokens, through router and workers, is what one engine does alone."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from subprocess import PIPE

import httpx
import pytest
import torch

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client, Completion
from baton.client.types import FinishReason
from baton.engine import LLM, EngineConfig
from baton.models import locate
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams
from tests.support.cluster.checkpoints import (
    beams,
    description_that_advises,
    prompt_of,
    reference,
)
from tests.support.cluster.second_router import second_router
from tests.support.cluster.watch import until_nothing_is_held

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
CODE = "def fibonacci(n):\n    "


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    num_threads = torch.get_num_threads()
    yield LLM.from_pretrained(TINY, EngineConfig(device="cpu", max_num_seqs=16, num_threads=1))
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
async def _nothing_is_left(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    await until_nothing_is_held(cluster)


def sampled(**fields: object) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 16, "temperature": 0.9, "seed": 7, "ignore_eos": True, **fields}
    )


def token_ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def alone(engine: LLM, prompt: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    (result,) = engine.generate([prompt], params)
    return [completion.token_ids for completion in result.completions]


# Several sequences.


@pytest.mark.parametrize("length", [1, 16, 90])
async def test_seeded_samples_equal_those_of_one_engine(client, engine, length):
    prompt, params = prompt_of(length, seed=70), sampled(n=3)
    completions = await client.generate(prompt, params).completions()
    assert token_ids(completions) == alone(engine, prompt, params)
    assert len(set(token_ids(completions))) == 3
    assert [len(ids) for ids in token_ids(completions)] == [16] * 3


async def test_stop_string_ends_one_sequence_only(client):
    texts = await client.generate(CODE, sampled(n=3, max_tokens=60)).texts()
    # What only one of them says, in its middle.
    stop = next(
        word
        for word in re.findall(r"\S{3,}", texts[1])
        if word not in texts[0] and word not in texts[2]
    )
    completions = await client.generate(
        CODE, sampled(n=3, max_tokens=60, stop=(stop,))
    ).completions()
    assert [c.finished.reason for c in completions] == [
        FinishReason.LENGTH,
        FinishReason.STOP_STRING,
        FinishReason.LENGTH,
    ]
    assert [completions[0].text, completions[2].text] == [texts[0], texts[2]]
    assert completions[1].text == texts[1].split(stop)[0]
    assert completions[1].finished.stop_string == completions[1].finished.stop_reason == stop


# A crowd.

CROWD = (
    sampled(n=4, max_tokens=80),
    sampled(n=2, best_of=4, max_tokens=80),
    SamplingParams(max_tokens=40, beam_width=4, n=3, ignore_eos=True),
    sampled(max_tokens=120, repetition_penalty=1.2, logprobs=True, prompt_logprobs=2),
)


async def test_cancelled_requests_of_all_kinds_leak_nothing(client):
    asked = [(prompt_of(5 + 7 * i, seed=i), CROWD[i % len(CROWD)]) for i in range(24)]
    reading = [asyncio.create_task(client.generate(*r).completions()) for r in asked]
    await asyncio.sleep(0.7)
    for task in reading:
        task.cancel()
    ended = await asyncio.gather(*reading, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ended)


# Beams.


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [(1.0, EarlyStopping.HEURISTIC), (0.0, EarlyStopping.FIRST), (2.0, EarlyStopping.NEVER)],
)
async def test_beams_equal_those_of_transformers(client, length_penalty, early_stopping):
    prompt = prompt_of(21, seed=77)
    params = SamplingParams(
        max_tokens=12,
        n=3,
        beam_width=4,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=True,
    )
    completions = await client.generate(prompt, params).completions()
    expected = beams(TINY, prompt, params)
    assert token_ids(completions) == [ids for ids, _ in expected]
    scores = [completion.finished.score for completion in completions]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)


# One token after the other.

PROCESSORS = {
    "min_p": {"min_p": 0.2},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    "bias": {"logit_bias": tuple((token_id, 8.0) for token_id in range(20, 60))},
    "banned tokens": {"bad_token_ids": ((30,), (40, 50)), "logit_bias": ((30, 50.0),)},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("fields", PROCESSORS.values(), ids=PROCESSORS)
async def test_logit_processors_act_as_in_one_engine(client, engine, fields, temperature):
    prompt, params = prompt_of(50, seed=78), sampled(temperature=temperature, **fields)
    plain = await client.generate(prompt, sampled(temperature=temperature)).token_ids()
    changed = await client.generate(prompt, params).token_ids()
    assert [tuple(changed)] == alone(engine, prompt, params)
    assert temperature == 0.0 or changed != plain


# Log-probabilities.


@pytest.mark.parametrize("num_top", [0, 5])
async def test_logprobs_of_every_token_equal_those_of_one_engine(client, engine, num_top):
    prompt, params = prompt_of(33, seed=81), sampled(logprobs=True, top_logprobs=num_top)
    (completion,) = await client.generate(prompt, params).completions()
    (result,) = engine.generate([prompt], params)
    expected = result.completions[0].logprobs
    assert completion.logprobs == pytest.approx([e.logprob for e in expected], abs=1e-4)
    assert [tuple(top) for top in completion.top_logprobs] == [
        e.top_token_ids for e in expected if num_top
    ]
    for top, e in zip(completion.top_logprobs, expected, strict=False):
        assert len(top) == num_top
        assert list(top.values()) == pytest.approx(list(e.top_logprobs), abs=1e-4)
        assert list(top.values()) == sorted(top.values(), reverse=True)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"best_of": 2}, {"max_tokens": 1}])
async def test_prompt_logprobs_equal_those_of_transformers(client, fields):
    prompt = prompt_of(100, seed=83)
    with torch.inference_mode():
        logits = reference(TINY)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)
    for _ in range(2):  # the second time its beginning is in every cache
        generation = client.generate(prompt, sampled(prompt_logprobs=3, **fields))
        await anext(generation)
        scored = generation.prompt_logprobs
        await generation.texts()
        assert generation.prompt_logprobs == scored
        assert len(scored) == len(prompt) - 1
        for i, logprobs in enumerate(scored):
            assert logprobs.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-3)
            assert list(logprobs.top) == expected[i].topk(3).indices.tolist()


# Grammars.

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["add", "subtract"]},
        "arity": {"type": "integer", "minimum": 0, "maximum": 9},
        "pure": {"type": "boolean"},
    },
    "required": ["name", "arity", "pure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # the model likes to indent
}


def grammar(kind: GrammarKind, text: str, **fields: object) -> SamplingParams:
    return sampled(
        **{"max_tokens": 100, "ignore_eos": False, "grammar": Grammar(kind, text), **fields}
    )


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"n": 3}, {"best_of": 3}])
async def test_json_output_follows_its_schema(client, fields):
    params = grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), **fields)
    for completion in await client.generate("Describe it: ", params).completions():
        answer = json.loads(completion.text)
        assert answer["name"] in ("add", "subtract")
        assert 0 <= answer["arity"] <= 9
        assert isinstance(answer["pure"], bool)
        assert completion.finished.reason is FinishReason.END_OF_SEQUENCE


async def test_output_matches_its_regular_expression(client, engine):
    pattern = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    params = grammar(GrammarKind.REGEX, pattern)
    generation = client.generate("The date: ", params)
    assert re.fullmatch(pattern, await generation.text())
    (result,) = engine.generate(["The date: "], params)
    assert tuple(await generation.token_ids()) == result.token_ids


# What a checkpoint advises.


@pytest.fixture(scope="module")
def advising(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A setting of routers: their model advises what changes greedy answers."""
    folder = tmp_path_factory.mktemp("advising") / "tiny"
    return description_that_advises(folder, temperature=0, repetition_penalty=1.8)


@pytest.mark.parametrize(("source", "penalty"), [("model", 1.8), ("api", 1.0)])
def test_requests_have_what_the_checkpoint_advises(cluster, advising, source, penalty):
    plain = SamplingParams(max_tokens=24)
    explicit = replace(plain, temperature=0.0, repetition_penalty=penalty)
    advice = {"temperature": 0.0, "repetition_penalty": 1.8} if source == "model" else {}
    with (
        second_router(cluster, http=True, model=advising, sampling_defaults=source) as router,
        Client(router.address) as client,
    ):
        (own,), (told,) = (client.generate(CODE, each).texts() for each in (plain, explicit))
        assert own == told
        body = {"prompt": CODE, "max_tokens": 24, **({} if advice else {"temperature": 0})}
        answer = httpx.post(f"{router.http_address}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == told
        (listed,) = httpx.get(f"{router.http_address}/v1/models").json()["data"]
        assert listed["sampling_defaults"] == client.get_model().sampling_defaults.given == advice


LINE = "A queue in Python."
OPTIONS = ["--repetition-penalty", "1.3"]
# Arguments of commands, their prompts, and how they choose tokens, where the checkpoint advises
# something and where a setting turns that off.
COMMANDS: dict[str, tuple[list[str], object, dict[str, float], dict[str, float]]] = {
    "generate": (["generate", CODE], CODE, {"repetition_penalty": 1.8}, {}),
    "generate with options": (
        ["generate", CODE, *OPTIONS],
        CODE,
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
    ),
    "chat": (
        ["chat", "--seed", "7"],
        [{"role": "user", "content": LINE}],
        {"repetition_penalty": 1.8, "top_p": 0.95},
        {"temperature": 0.7, "top_p": 0.95, "seed": 7},
    ),
    "chat with options": (
        ["chat", "--seed", "7", "--temperature", "0.9", *OPTIONS],
        [{"role": "user", "content": LINE}],
        {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.95, "seed": 7},
        {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.95, "seed": 7},
    ),
}


@pytest.mark.parametrize("source", ["model", "api"])
def test_commands_have_what_the_checkpoint_advises(cluster, advising, source):
    """Options that are given win."""
    nothing = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 24}
    with (
        second_router(cluster, model=advising, sampling_defaults=source) as router,
        Client(router.address) as client,
    ):
        for arguments, prompt, advised, own in COMMANDS.values():
            told, other = (
                client.generate(prompt, SamplingParams(**{**nothing, **params})).text()
                for params in ((advised, own) if source == "model" else (own, advised))
            )
            command = [sys.executable, "-m", "baton", *arguments, "--max-tokens", "24"]
            said = subprocess.check_output(
                [*command, "--address", router.address], text=True, input=LINE, stderr=PIPE
            )
            assert said.removesuffix("\n") == told.removesuffix("\n"), arguments
            assert (told == other) == (advised == own), arguments
