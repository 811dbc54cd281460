"""Properties of the images, as far as the Dockerfile says them."""

import importlib
import json
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from tests.support.container_file import DOCKERFILE, ROOT, context, environment, lineage, read

IMAGES = ("router", "worker")
CHART = ROOT / "helm" / "baton"


def test_base_image_is_pinned():
    arguments, stages = read()
    bases = {stage.base for stage in stages.values()} - set(stages)
    assert bases == {"${PYTHON_IMAGE}"}
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-slim-\w+", arguments["PYTHON_IMAGE"])
    assert ":latest" not in DOCKERFILE.read_text()


def test_make_images_passes_digest_of_base():
    base = f"registry.example/python@sha256:{'0' * 64}"
    command = ["make", "-n", "--no-print-directory", "images", f"PYTHON_IMAGE={base}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(IMAGES)
    assert all(f"--build-arg PYTHON_IMAGE={base} " in line for line in lines)


def test_base_image_has_python_of_locks():
    lock = (ROOT / "helm" / "image" / "lock.py").read_text()
    arguments, _ = read()
    (python,) = re.findall(r'^PYTHON = "(.*)"$', lock, re.MULTILINE)
    assert f"python:{python}." in arguments["PYTHON_IMAGE"]


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_as_unprivileged_user(image):
    users = [user for stage in lineage(image) for user in stage.all("USER")]
    assert users == ["10001:10001"]
    # Whatever needs root comes before.
    last = lineage(image)[-1].instructions
    after = last[last.index(("USER", "10001:10001")) :]
    assert [keyword for keyword, _ in after] == ["USER", "CMD"]


@pytest.mark.parametrize("image", IMAGES)
def test_images_write_only_to_tmp_and_cache(image):
    said = environment(image)
    volumes = [
        v for stage in lineage(image) for text in stage.all("VOLUME") for v in json.loads(text)
    ]
    assert volumes == ["/tmp", "/cache"]
    written = [said[name] for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR")]
    assert all(path.startswith(tuple(volumes)) for path in written)
    assert said["PYTHONDONTWRITEBYTECODE"] == "1"
    # Nor is a module looked for where something may be written.
    assert said["PYTHONSAFEPATH"] == "1"


def test_dockerfile_has_no_healthcheck():
    assert "HEALTHCHECK" not in DOCKERFILE.read_text().replace("no HEALTHCHECK", "")


@pytest.mark.parametrize("image", IMAGES)
def test_image_command_is_installed_entry_point(image):
    commands = [json.loads(c) for stage in lineage(image) for c in stage.all("CMD")]
    (command,) = commands
    program, name = command
    assert program in {point.name for point in entry_points(group="console_scripts")}
    assert name in {point.name for point in entry_points(group="baton.commands")}
    assert environment(image)["PATH"].startswith("/opt/baton/bin:")


@pytest.mark.parametrize("image", IMAGES)
def test_image_entrypoint_is_init(image):
    entrypoints = [json.loads(e) for stage in lineage(image) for e in stage.all("ENTRYPOINT")]
    assert entrypoints == [["/usr/bin/tini", "--"]]


def test_chart_pods_run_command_of_their_image():
    """`baton-router` and `baton-worker`, of the version that the chart asks for."""
    commands = {
        "router": CHART / "templates" / "router-deployment.yaml",
        "worker": CHART / "templates" / "workers-deployment.yaml",
    }
    _, stages = read()
    for image, template in commands.items():
        text = template.read_text()
        assert f'"image" "{image}"' in text
        assert image in stages
        assert re.findall(r"^ +args: \[baton, ", text, re.MULTILINE)
        # Which would replace the entrypoint.
        assert "command:" not in text
    made = subprocess.run(["make", "-n", "images"], cwd=ROOT, capture_output=True, text=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for image in IMAGES:
        assert f"--target {image} --tag baton-{image}:{version}" in made.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version


def test_dockerfile_steps_are_those_that_tests_run():
    """But the init and the C compiler, which Debian has."""
    _, stages = read()
    steps = {name: stage.all("RUN") for name, stage in stages.items() if stage.all("RUN")}
    assert set(steps) == {"dist", "router-root", "worker-root", "runtime", "worker"}
    for name in ("dist", "router-root", "worker-root"):
        assert all("build.sh " in step for step in steps[name])
    init, cache = steps["runtime"]
    assert "--no-install-recommends tini &&" in init
    assert cache == "install -d -o 10001 -g 10001 /cache"
    assert len(steps["worker"]) == 1


@pytest.mark.system
def test_worker_image_has_compiler_for_triton(tmp_path):
    """It runs `gcc` when a kernel is first used, with the headers of the C library."""
    assert shutil.which("gcc"), "gcc is not installed; on Debian: apt-get install gcc libc6-dev"
    _, stages = read()
    (step,) = stages["worker"].all("RUN")
    assert "--no-install-recommends gcc libc6-dev &&" in step
    build = importlib.import_module("triton.runtime.build")
    source = tmp_path / "probe.c"
    source.write_text("#include <stdint.h>\nint32_t probe(void) { return 0; }\n")
    assert Path(build._build("probe", str(source), str(tmp_path), [], [], [], [])).exists()
    if shutil.which("apt-get") is not None:
        command = ["apt-get", "install", "--simulate", "gcc", "libc6-dev", "tini"]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_build_context_has_only_sources_of_images(tmp_path):
    context(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    made_of = {p.split("/")[1] for p in packages["targets"]["sdist"]["include"]}
    assert names == made_of | {"helm", "LICENSE", "README.md", "pyproject.toml"}
    assert [p.name for p in (tmp_path / "helm").iterdir()] == ["image"]
    assert [p.name for p in (tmp_path / "bench").iterdir()] == ["simulator"]
    assert not list(tmp_path.rglob("__pycache__"))
