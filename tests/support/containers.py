"""Podman with all its state in one folder, for tests of the images. As root, on Debian.

Containers share the network of this machine, so that they can listen on loopback alone.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.repository import ROOT
from tests.support.waiting import wait_until

PROGRAMS = ("podman", "runc", "mmdebstrap")
# What matters here of python:*-slim, which keeps neither packages nor apt's caches either.
_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
_APT = """DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";"""
_CONTAINERFILE_OF_REDIS = """
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server
USER 10001:10001
"""
# Hybrid cgroups are beyond crun, and the default limits beyond what a container of CI may have.
_SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
volumes = {volumes}
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{folder}/tmp"
image_copy_tmp_dir = "{folder}"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""
# As the chart's pods: nothing is written but to volumes, and nothing may be gained.
RESTRICTED = (
    *("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
    *("--user", "10001:10001"),
)
# Seconds after which a container that a killed test left ends by itself.
_LONGEST = 1800


@dataclass(frozen=True)
class Stopped:
    """End of a container.

    Attributes:
        seconds: duration of `podman stop`.
    """

    exit_code: int
    seconds: float


class Podman:
    """Podman whose images, containers and settings are in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cgroup = folder.name
        (folder / "tmp").mkdir()
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
        settings = {"run": [], "build": list(_pip_volumes(folder))}
        for name, volumes in settings.items():
            text = _SETTINGS.format(folder=folder, volumes=json.dumps(volumes))
            (folder / f"{name}.conf").write_text(text)

    def environment(self, settings: str = "run") -> dict[str, str]:
        """Returns the environment of podman. `settings`: `run`, or `build`, which has pip's
        configuration of this machine in sight."""
        return {
            **os.environ,
            "CONTAINERS_CONF": f"{self.folder}/{settings}.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.folder}/storage.conf",
        }

    def __call__(self, *arguments: str, check: bool = True, within: float = 120.0) -> str:
        """Runs podman; returns its stdout."""
        return _run(["podman", *arguments], self.environment(), within, check=check)

    def import_base(self) -> str:
        """Makes a base image of Debian's packages; returns its name with its digest."""
        archive = self.folder / "base.tar"
        configure = f"echo '{_APT}' > $1/etc/apt/apt.conf.d/docker-clean; rm $1/var/cache/apt/*.bin"
        include = f"--include={','.join(_PACKAGES)}"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", include]
        valid = "--aptopt=Acquire::Check-Valid-Until false"
        hook = f"--customize-hook={configure}"
        _run([*command, valid, hook, "bookworm", str(archive)], dict(os.environ), 300)
        self("import", str(archive), "localhost/python:3.11")
        archive.unlink()
        digest = self("image", "inspect", "--format", "{{.Digest}}", "localhost/python:3.11")
        return f"localhost/python@{digest.strip()}"

    def make_images(self, base: str) -> None:
        """Builds both images, the worker's for CPUs, by the command that people use."""
        index = os.environ.get("TORCH_INDEX")
        worker = "--build-arg WORKER=worker-cpu"
        if index:
            worker += f" --build-arg TORCH_INDEX={index}"
        words = ["images", "CONTAINER=podman", f"PYTHON_IMAGE={base}", f"WORKER_ARGS={worker}"]
        command = ["make", "--no-print-directory", "-C", str(ROOT), *words]
        _run(command, self.environment("build"), 1500)

    def make_redis(self, base: str) -> None:
        """Builds an image `redis` with Debian's server."""
        file = self.folder / "Containerfile"
        file.write_text(_CONTAINERFILE_OF_REDIS.format(base=base))
        arguments = ["--tag", "redis", "--file", str(file), str(self.folder / "tmp")]
        _run(["podman", "build", *arguments], self.environment("build"), 300)

    def size(self, image: str) -> int:
        """Returns the bytes of an image with those below it."""
        return int(self("image", "inspect", "--format", "{{.Size}}", image))

    def start(self, name: str, image: str, *command: str, **settings: object) -> None:
        """Runs a container in the background, restricted, with these settings of Baton."""
        variables = [
            word
            for key, value in settings.items()
            for word in ("-e", f"BATON_{key.upper()}={value}")
        ]
        limits = ["--timeout", str(_LONGEST), "--cgroup-parent", f"/{self._cgroup}"]
        self("run", "--detach", "--name", name, *limits, *RESTRICTED, *variables, image, *command)

    def stop(self, name: str, grace: int) -> Stopped:
        """Sends SIGTERM, and SIGKILL after `grace` seconds."""
        began = time.monotonic()
        self("stop", "--time", str(grace), name, within=grace + 60.0)
        seconds = time.monotonic() - began
        code = self("inspect", "--format", "{{.State.ExitCode}}", name)
        return Stopped(int(code), seconds)

    def signal(self, name: str, signal: str) -> None:
        self("kill", "--signal", signal, name)

    def logs(self, name: str) -> str:
        command = ["podman", "logs", name]
        done = subprocess.run(
            command,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.stdout

    def remove(self, *names: str) -> None:
        self("rm", "--force", "--time", "0", "--volumes", *names)

    def close(self) -> None:
        """Removes every container, mount and cgroup. Fails if a process is left."""
        self("rm", "--all", "--force", "--time", "0", "--volumes")
        wait_until(lambda: not self._processes(), 30.0, "the end of all containers")
        for parent in Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}"):
            for inner in sorted(parent.glob("**/"), reverse=True):
                inner.rmdir()
        for mount in reversed(self._mounts()):  # of a podman that was killed
            _run(["umount", mount], dict(os.environ), 30)

    def _mounts(self) -> list[str]:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [path for _, path, *_ in map(str.split, lines) if path.startswith(f"{self.folder}/")]

    def _processes(self) -> list[str]:
        """Returns command lines of this podman's monitors of containers."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue
            if "conmon" in text and str(self.folder) in text:
                found.append(text)
        return found


@contextmanager
def temporary_podman() -> Iterator[Podman]:
    """Podman in a new folder, removed afterwards with all that it runs. Fails without podman."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(f"needs root, and {', '.join(PROGRAMS)}; run .ci/packages --nightly as root")
    with TemporaryDirectory(prefix="baton-containers-") as folder:
        podman = Podman(Path(folder))
        try:
            yield podman
        finally:
            podman.close()


def _run(
    command: Sequence[str], environment: dict[str, str], within: float, *, check: bool = True
) -> str:
    # `timeout` ends what the command has started as well.
    bounded = ["timeout", "--kill-after=10", str(within), *command]
    done = subprocess.run(bounded, env=environment, capture_output=True, text=True)
    if check:
        said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{said}"
    return done.stdout


def _pip_volumes(folder: Path) -> Iterator[str]:
    """Yields volumes by which pip in a container installs from where it does on this machine.

    Files and folders have the paths that they have here.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = _run(command, dict(os.environ), 60).splitlines()
    settings: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")  # those of the environment come first, and hold
        settings.setdefault(key.split(".")[-1], value.strip("'").replace("\\n", " "))
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items()))
    yield f"{file}:/etc/pip.conf:ro"
    for word in dict.fromkeys(" ".join(settings.values()).split()):
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index names the files beside it.
            shared = path.parent if word.startswith("file://") else path
            yield f"{shared}:{shared}:ro"
