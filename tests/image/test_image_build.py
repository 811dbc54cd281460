"""The images, as far as they can be had without a container engine: the steps of the Dockerfile run
in a folder, and what they leave there serves."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.cli.local.ports import HOST, free_port
from baton.cluster.parent_death import dying_with_parent
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import UnavailableError
from tests.support import container_file
from tests.support.image_families import NAMES, outcomes_in, save_families
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(600)]

MOST_BYTES = 300_000_000
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def distributions(root):
    """The names of all that is installed."""
    found = root.glob("lib/python*/site-packages/*.dist-info")
    return {folder.name.partition("-")[0] for folder in found}


def files_of(root):
    return {
        str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in root.rglob("*") if p.is_file()
    }


@contextmanager
def running(root, image, folder, command, **settings):
    """Runs an image's command as a pod does, with the variables that the image sets."""
    said = container_file.environment(image)
    said["PATH"] = said["PATH"].replace("/opt/baton", str(root))
    for name, value in said.items():
        for written in ("/tmp", "/cache"):
            if value.startswith(written):
                said[name] = f"{folder}{value}"
    variables = {f"BATON_{name.upper()}": str(value) for name, value in settings.items()}
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            dying_with_parent([str(root / "bin" / "baton"), command]),
            env={**said, **variables},
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print((folder / "log").read_text(errors="replace"))  # which pytest shows of a failed test


def answer_of(client):
    """Returns the answer to a prompt, once there are workers."""

    def answer():
        return client.generate("import os", GREEDY).text()

    wait_until(answer, 60.0, "an answer", ignoring=(UnavailableError,))
    return answer()


def test_router_image_has_no_torch_and_under_300_mb(router_root):
    """With what Python has compiled."""
    names = distributions(router_root)
    assert {"baton_serve", "grpcio", "starlette", "uvicorn"} <= names
    assert not {"torch", "triton", "llguidance", "pip"} & names
    total = sum(size for size, _ in files_of(router_root).values())
    print(f"the router's image: {total / 1e6:.0f} MB of {len(names)} wheels")
    assert total < MOST_BYTES


def test_router_image_serves_and_leaves_its_files_unchanged(router_root, cluster, tmp_path):
    before = files_of(router_root)
    port = free_port(set())
    http = free_port({port})
    settings = {"port": port, "admin_port": 0, "http_port": http, "redis_url": cluster.redis_url}
    with running(router_root, "router", tmp_path, "router", **settings) as router:
        with Client(cluster.address) as client:
            expected = client.generate("import os", GREEDY).text()
        with Client(f"{HOST}:{port}") as client:
            assert answer_of(client) == expected
        with urllib.request.urlopen(f"http://{HOST}:{http}/v1/models", timeout=30) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
        router.send_signal(signal.SIGTERM)
        assert router.wait(30) == 0
    assert files_of(router_root) == before


def test_router_image_reads_image_of_each_family(router_root, tmp_path):
    save_families(tmp_path)
    outcomes = outcomes_in(router_root, tmp_path)
    assert outcomes.keys() == {*NAMES, "shapes"}
    assert all(isinstance(outcome, int) and outcome > 0 for outcome in outcomes.values()), outcomes


def test_router_and_worker_images_form_cluster(router_root, worker_root, tmp_path):
    """Every file by its hash, but for torch, whose builds for CPUs PyPI has not."""
    assert {"torch", "nixl", "baton_serve"} <= distributions(worker_root)
    assert "triton" not in distributions(worker_root)
    before = files_of(worker_root)
    ports: set[int] = set()
    with EmbeddedRedis() as redis, ExitStack() as stack:

        def start(root, image, command, **settings):
            port = free_port(ports)
            admin_port = free_port({*ports, port})
            ports.update((port, admin_port))
            folder = tmp_path / command
            folder.mkdir()
            own = {"port": port, "admin_port": admin_port, "redis_url": redis.url}
            stack.enter_context(running(root, image, folder, command, **own, **settings))
            return f"{HOST}:{port}", f"{HOST}:{admin_port}"

        for role in ("prefill-worker", "decode-worker"):
            start(worker_root, "worker", role, num_blocks=64, device="cpu")
        address, admin_address = start(
            router_root, "router", "router", conditional_disaggregation=False
        )
        with Client(address, admin_address=admin_address) as client:
            assert answer_of(client)
            assert len(client.list_workers()) == 2
    assert files_of(worker_root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_cache_folder_belongs_to_image_user(tmp_path):
    container_file.build("runtime", tmp_path)
    found = (tmp_path / "cache").stat()
    assert found.st_mode & 0o777 == 0o755
    assert (found.st_uid, found.st_gid) == (10001, 10001)


def test_image_build_refuses_package_with_wrong_hash(tmp_path):
    """By the command that images are built with."""
    folder = tmp_path / "image"
    folder.mkdir()
    source = container_file.ROOT / "helm" / "image"
    (folder / "build.sh").write_text((source / "build.sh").read_text())
    (folder / "one.txt").write_text(f"annotated-doc==0.0.7 --hash=sha256:{'0' * 64}\n")
    command = ["/bin/sh", folder / "build.sh", "dependencies", "one", tmp_path / "root"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert not list(Path(tmp_path / "root").glob("lib/*/site-packages/annotated_doc*"))
