"""Prompts with images on the processes of a cluster, by the parts of a router that place requests
and run them."""

from functools import partial

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster.image_requests import (
    Asked,
    Model,
    Running,
    prompts_of,
    requests_of,
    router_of,
)
from tests.support.cluster.named_clusters import Traced
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import name_of
from tests.support.engine.images import IMAGE_TOKEN, TOKENS_PER_IMAGE, image, words
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

PREFILL_ENCODES = ()  # no other worker encodes the images


@pytest.fixture(scope="module")
def llava(pictured_shape: Traced) -> Model:
    return Model(pictured_shape.cluster.model)


@pytest.fixture
def cluster(pictured: LocalCluster) -> LocalCluster:
    return pictured


@pytest.fixture
def asked(request: pytest.FixtureRequest, llava: Model) -> Asked:
    return Asked(llava, request.param)


_TEXT = f"{words(20, 1)} {IMAGE_TOKEN} {words(30, 2)}"
_CACHED = (50 + TOKENS_PER_IMAGE) // 16 * 16


@requests_of([(_TEXT, (image(91),)), (_TEXT, (image(91),)), (_TEXT, (image(92),))])
async def test_router_finds_equal_images_cached_after_restart(cluster, llava, asked):
    first, again, other = asked.requests
    running = []
    async with router_of(cluster, llava) as router:
        running.append(Running(router.lifecycle(first, PREFILL_ENCODES)))
        await running[0].task
    async with router_of(cluster, llava) as router:
        for role in ("prefill", "decode"):
            await until(partial(router.knows, again, role, _CACHED))
            assert router.knows(other, role, 16)  # the text before the image
        for request in (again, other):
            running.append(Running(router.lifecycle(request, PREFILL_ENCODES)))
            await running[-1].task
    await asked.check(running)
    assert [each.usage.num_cached_prompt_tokens for each in running] == [0, _CACHED, 16]
    await until_nothing_is_held(cluster)


@requests_of(prompts_of(61))
async def test_images_survive_killed_prefill_worker(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, PREFILL_ENCODES)
        await until(lambda: any(each.is_accepted for each in running))
        accepted = next(each for each in running if each.is_accepted)
        cluster.kill(name_of(cluster, accepted.lifecycle.placement.prefill))
        await asked.check(running)
    assert accepted.usage.num_migrations > 0, "it was killed after the prompt"


@requests_of(prompts_of(62))
async def test_images_survive_killed_decode_worker(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, PREFILL_ENCODES)
        await until(lambda: len(running[0].tokens) > 3)
        cluster.kill(name_of(cluster, running[0].lifecycle.placement.decode))
        await asked.check(running)
    assert running[0].usage.num_migrations > 0


@requests_of(prompts_of(63))
async def test_draining_decode_worker_hands_over_images(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, PREFILL_ENCODES)
        await until(lambda: len(running[0].tokens) > 3)
        process = cluster.process(name_of(cluster, running[0].lifecycle.placement.decode))
        async with grpc.aio.insecure_channel(process.admin_endpoint) as channel:
            await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)
        await asked.check(running)
    assert running[0].usage.num_migrations == 1
