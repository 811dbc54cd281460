"""A router process of a vision model: images over gRPC and its processes' lives."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.child_processes import children_running
from tests.support.engine.images import IMAGE_TOKEN, PLACEHOLDER_ID, TOKENS_PER_IMAGE, image
from tests.support.router.hostile_images import png_bomb
from tests.support.router.images import encoded, save_checkpoint
from tests.support.router.lone_router import LoneRouter, lone_router
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
GOOD = encoded(image(1))
TEXT = f"w5 {IMAGE_TOKEN} w6"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_checkpoint("llava_clip", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def router(checkpoint) -> Iterator[LoneRouter]:
    with lone_router(model=f"llava={checkpoint}", images_processes=1) as started:
        yield started


def tokens_of(router: LoneRouter, *files: bytes, text: str = TEXT) -> list[int]:
    with router.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = pb.TokenizeRequest(text=text, images=[pb.Image(data=file) for file in files])
        return list(stub.Tokenize(message, timeout=60).token_ids)


def image_processes(router: LoneRouter) -> list[psutil.Process]:
    return children_running("image_process", psutil.Process(router._process.pid))


def test_router_expands_images_without_torch(router):
    assert tokens_of(router, GOOD).count(PLACEHOLDER_ID) == TOKENS_PER_IMAGE
    (child,) = image_processes(router)
    for pid in (router._process.pid, child.pid):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_router_survives_hostile_images(router):
    for file in (png_bomb(60_000), png_bomb(9000), b"x" * 1000, GOOD[:200]):
        with pytest.raises(grpc.RpcError) as caught:
            tokens_of(router, file)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("images[0].data: ")
    (child,) = image_processes(router)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    assert tokens_of(router, GOOD).count(PLACEHOLDER_ID) == TOKENS_PER_IMAGE


def test_router_takes_large_image_over_grpc(router):
    noise = encoded(image(1).resize((1400, 1400)), "PNG", compress_level=0)
    assert len(noise) > 5 * 2**20
    assert tokens_of(router, noise).count(PLACEHOLDER_ID) == TOKENS_PER_IMAGE


def test_router_without_processor_serves_text(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "llava")
    (tmp_path / "llava" / "processor_config.json").unlink()
    with lone_router(model=str(tmp_path / "llava")) as router:
        assert tokens_of(router, text="w5 w6") == [5, 6]
        with pytest.raises(grpc.RpcError) as caught:
            tokens_of(router, GOOD)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        why = caught.value.details()
        assert why.startswith("model 'llava' takes no images: the processor of ")
        assert "cannot be loaded" in why
        assert len([line for line in router.log().splitlines() if why in line]) == 1


def test_image_process_ends_with_its_router(checkpoint):
    with lone_router(model=checkpoint) as router:
        (child,) = image_processes(router)
        os.kill(router._process.pid, signal.SIGKILL)
        wait_until(lambda: not child.is_running(), within=10.0, what="the end of the process")
