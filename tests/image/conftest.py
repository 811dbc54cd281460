"""Artifacts that are built once for all tests of packages and images."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import container_file
from tests.support.cluster.fixtures import *  # noqa: F403
from tests.support.containers import Podman, temporary_podman


@pytest.fixture(scope="session")
def scratch():
    """Yields the folder in which the steps of the Dockerfile have been run as far as the wheel."""
    with tempfile.TemporaryDirectory(prefix="baton-image-") as folder:
        container_file.build("dist", Path(folder))
        yield Path(folder)


@pytest.fixture(scope="session")
def wheel(scratch):
    (found,) = (scratch / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="session")
def sdist(scratch):
    (found,) = (scratch / "dist").glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def router_root(scratch):
    """The folder /opt/baton of the router's image."""
    container_file.build("router-root", scratch)
    return scratch / "opt" / "baton"


@pytest.fixture(scope="session")
def worker_root(scratch):
    """The folder /opt/baton of the worker's image, the one for CPUs."""
    with tempfile.TemporaryDirectory(prefix="baton-image-") as folder:
        here = Path(folder)
        shutil.copytree(scratch / "dist", here / "dist")
        container_file.build("worker-root", here, {"WORKER": "worker-cpu"})
        yield here / "opt" / "baton"


@pytest.fixture(scope="session")
def run_in():
    """Runs a program of a virtual environment, with nothing of this repository in sight."""

    def run(root, program, *arguments, **variables):
        environment = {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root), **variables}
        command = [root / "bin" / program, *map(str, arguments)]
        return subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    with temporary_podman() as running:
        yield running


@pytest.fixture(scope="session")
def base(podman):
    """The base image, by its digest."""
    return podman.import_base()


@pytest.fixture(scope="session")
def images(podman, base):
    """Names of the images, by the command of the Dockerfile that they have."""
    podman.make_images(base)
    podman.make_redis(base)
    listed = podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    (router,) = [name for name in listed if "/baton-router:" in name]
    (worker,) = [name for name in listed if "/baton-worker:" in name]
    return {"router": router, "worker": worker, "redis": "localhost/redis:latest"}
