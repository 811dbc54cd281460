"""The images as podman builds them from the Dockerfile, and as containers that are stopped in every
phase."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from baton import Client, Image, Message, SamplingParams
from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from baton.errors import UnavailableError
from baton.models import locate
from baton.models.shapes.drawings import held_out, questions
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.containers import Containers, containers_of
from tests.support.containers import RESTRICTED, Podman
from tests.support.router.images import encoded
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(1800)]

MOST_BYTES = 300_000_000
PROMPT = "import os"
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
ROUTER, PREFILLS, DECODES = "router", ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ROLES = {"router": ROUTER, "prefill-worker": PREFILLS[0], "decode-worker": DECODES[0]}
READY = {
    "router": "metrics are at",
    "prefill-worker": "is ready at",
    "decode-worker": "is ready at",
}
DRAINING = "draining; a second signal stops at once"
# Before it listens, and afterwards.
CODES_OF_START = {143, 0}
MOMENTS = 4


@pytest.fixture(scope="module")
def containers(podman, images) -> Iterator[Containers]:
    names = {
        ROUTER: "router",
        **dict.fromkeys(PREFILLS, "prefill-worker"),
        **dict.fromkeys(DECODES, "decode-worker"),
    }
    with containers_of(podman, images, names) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    """Engine in this process: the answers that containers have to give."""
    with LLM.from_pretrained(locate("tiny"), EngineConfig(device="cpu", num_blocks=512)) as own:
        yield own


def answer_of(engine: LLM, prompt: str | list[int], params: SamplingParams) -> list[int]:
    (result,) = engine.generate([prompt], params)
    return list(result.completions[0].token_ids)


def test_images_are_made_on_base_of_given_digest(podman, base, images):
    (below,) = layers(podman, base)
    for image in (images["router"], images["worker"]):
        assert layers(podman, image)[0] == below
    name, _, _ = base.partition("@")
    with pytest.raises(AssertionError, match=r"make .* PYTHON_IMAGE="):
        podman.make_images(f"{name}@sha256:{'0' * 64}")


def layers(podman: Podman, image: str) -> list[str]:
    found = podman("image", "inspect", "--format", "{{json .RootFS.Layers}}", image)
    return list(json.loads(found))


def test_router_image_adds_under_300_mb_to_its_base(podman, base, images):
    """With what Python has compiled, as it is stored and pulled."""
    below = podman.size(base)
    own = {image: podman.size(images[image]) - below for image in ("router", "worker")}
    for image, size in own.items():
        print(f"{image}: {size / 1e6:.0f} MB above the base's {below / 1e6:.0f} MB")
        compiled = files_in(podman, images[image], "-name", "*.pyc")
        print(f"of these {sum(compiled.values()) / 1e6:.0f} MB compiled by Python; over 20 MB:")
        for path, bytes_ in sorted(files_in(podman, images[image], "-size", "+20M").items()):
            print(f"{bytes_ / 1e6:6.0f} MB {path}")
        assert sum(compiled.values()) > 10e6, "nothing would be read before each start else"
    assert own["router"] < MOST_BYTES


def files_in(podman: Podman, image: str, *tests: str) -> dict[str, int]:
    """Returns the bytes of files below /opt/baton that `find` finds."""
    command = ["find", "/opt/baton", "-type", "f", *tests, "-printf", "%s %p\\n"]
    lines = podman("run", "--rm", *RESTRICTED, image, *command).splitlines()
    return {path: int(size) for size, path in (line.split(" ", 1) for line in lines)}


def test_containers_run_restricted_under_an_init(podman, containers):
    for name in (ROUTER, *PREFILLS, *DECODES):
        (found,) = json.loads(podman("inspect", name))
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert not found["EffectiveCaps"]
        lines = podman("exec", name, "cat", "/proc/1/status").splitlines()
        status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
        assert status["Name"] == ["tini"]
        assert set(status["Uid"] + status["Gid"]) == {"10001"}
        assert status["NoNewPrivs"] == ["1"]
        assert {int(status[key][0], 16) for key in ("CapEff", "CapBnd", "CapPrm")} == {0}


def test_generate_outside_gives_tokens_of_local_engine(containers, engine):
    command = ["-m", "baton", "generate", PROMPT, "--address", containers.address, "--json"]
    options = ["--max-tokens", str(GREEDY.max_tokens), "--ignore-eos"]
    done = subprocess.run(
        [sys.executable, *command, *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["completions"][0]["token_ids"] == answer_of(engine, PROMPT, GREEDY)
    assert answer["prefill_worker"] in PREFILLS
    assert answer["decode_worker"] in DECODES


def test_containers_answer_about_image(containers):
    """The router preprocesses it, from the read-only root of its image."""
    drawing, _ = held_out(0)
    asked = [question for question in questions(drawing) if question.kind == "count"]
    with ExitStack() as stack:
        for role in ("prefill-worker", "decode-worker", "router"):
            address = stack.enter_context(
                containers.temporary(role, f"shapes-{role}", model="shapes")
            )
        client = stack.enter_context(Client(address))
        picture = Image(encoded(drawing.image()))

        def answer(question: str) -> str:
            messages = [Message("user", [picture, question])]
            return client.generate(messages, SamplingParams(max_tokens=24, temperature=0)).text()

        wait_until(lambda: answer(asked[0].text), 120.0, "an answer", ignoring=(UnavailableError,))
        assert [answer(each.text).strip() for each in asked] == [each.answer for each in asked]


@pytest.mark.parametrize("role", ROLES)
def test_container_ends_when_stopped_during_start(role, containers):
    """At moments from the first instruction to readiness; a lost signal would end with 137."""
    name = f"starting-{role}"
    codes = []
    began = time.monotonic()
    with containers.temporary(role, name):
        wait_until(lambda: READY[role] in containers.podman.logs(name), 300.0, "readiness")
        span = time.monotonic() - began
        codes.append(containers.stop(name))
    for moment in range(MOMENTS):
        with containers.temporary(role, name):
            time.sleep(span * moment / MOMENTS)
            codes.append(containers.stop(name))
    assert 143 in codes
    assert set(codes) <= CODES_OF_START


@pytest.mark.parametrize("role", ROLES)
def test_container_ends_with_0_when_stopped_idle(role, containers):
    name = ROLES[role]
    assert containers.stop(name) == 0
    assert containers.podman.logs(name).count(DRAINING) == 1
    containers.start_again(name)


@pytest.mark.parametrize("is_draining", [False, True], ids=["serving", "draining"])
@pytest.mark.parametrize("role", ROLES)
def test_no_token_is_lost_when_stopped_in_request(role, is_draining, containers, engine):
    """A second signal ends a drain at once: what a router still streams ends with an error then."""
    prompt = prompt_of(1000, seed=len(role) + is_draining)
    expected = answer_of(engine, prompt, LONG)
    tokens: list[int] = []
    with Client(containers.address) as client, ThreadPoolExecutor(1) as thread:
        generation = client.generate(prompt, LONG)
        placement = generation.accepted.placement
        chosen = {"prefill-worker": placement.prefill_worker, "router": ROUTER}
        name = chosen.get(role, placement.decode_worker)
        if role != "prefill-worker":
            tokens += next(generation).token_ids
        assert len(tokens) < len(expected) / 2
        if is_draining:
            containers.podman.signal(name, "TERM")
        stopped = thread.submit(containers.stop, name)
        error = None
        try:
            for chunk in generation:
                tokens += chunk.token_ids
        except UnavailableError as raised:
            error = raised
        assert stopped.result() == 0
    assert DRAINING in containers.podman.logs(name)
    if role == "router" and is_draining:
        assert error is not None
        assert tokens == expected[: len(tokens)]
    else:
        assert error is None
        assert tokens == expected
    if role == "decode-worker":
        assert generation.finished is not None
        assert generation.finished.usage.num_migrations
    containers.start_again(name)
