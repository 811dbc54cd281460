"""Publishing to an OCI registry: images, and a signed chart that names them by digest."""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from baton.cli.local.ports import HOST, free_port
from baton.cluster.parent_death import dying_with_parent
from tests.support.containers import Podman, temporary_podman
from tests.support.kube_tools import tool
from tests.support.rendered_chart import CHART
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

KEY = "Baton Releases <releases@baton.example>"
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
_REGISTRY = """
version: 0.1
storage: {{ filesystem: {{ rootdirectory: {folder} }} }}
http: {{ addr: {address} }}
"""


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Runs Debian's registry on loopback; yields its address."""
    program = shutil.which("docker-registry")
    assert program, "docker-registry is missing; run .ci/packages --nightly as root"
    address = f"{HOST}:{free_port(())}"
    settings = folder / "registry.yml"
    settings.write_text(_REGISTRY.format(folder=folder / "registry", address=address))
    with (folder / "registry.log").open("wb") as log:
        command = dying_with_parent([program, "serve", str(settings)])
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: answers(address), 30.0, "the registry")
        yield address
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with temporary_podman() as running:
        yield running


@contextmanager
def keys(home: Path, passphrase: str) -> Iterator[dict[str, str]]:
    """Makes a key that signs in a folder of GnuPG, and its public key in the file `public`; yields
    the variables of publish.sh."""
    home.mkdir(mode=0o700)
    (home / "passphrase").write_text(passphrase)

    def gpg(*arguments: str) -> None:
        secret = ["--pinentry-mode", "loopback", "--passphrase", passphrase]
        command = ["gpg", "--homedir", str(home), "--batch", *secret, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    gpg("--quick-generate-key", KEY, "rsa3072", "sign", "never")
    gpg("--output", str(home / "public"), "--export", KEY)
    phrase = {"GPG_PASSPHRASE_FILE": str(home / "passphrase")} if passphrase else {}
    try:
        yield {"GPG_KEY": KEY, "GNUPGHOME": str(home), **phrase}
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], timeout=30, check=True)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("major", "passphrase"), [("3", ""), ("4", "a phrase")])
def test_chart_and_images_are_pushed_and_signed(
    podman: Podman, major: str, passphrase: str, tmp_path: Path
) -> None:
    before = (CHART / "values.yaml").read_text()
    helm, home = str(tool("helm", major)), tmp_path / "gnupg"

    def run_helm(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [helm, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    with registry(tmp_path) as address, keys(home, passphrase) as variables:
        for name in ("router", "worker"):
            archive = tmp_path / f"{name}.tar"
            subprocess.run(["tar", "-cf", archive, "-C", ROOT, "LICENSE"], check=True)
            podman("import", str(archive), f"{address}/llm/baton-{name}:{VERSION}")
        told = {"CONTAINER": "podman", "HELM": helm, **variables}
        published = subprocess.run(
            [ROOT / "helm" / "publish.sh", f"{address}/llm/", "--plain-http"],
            env={**podman.environment(), **told},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert published.returncode == 0, published.stderr
        digests = {name: digest_at(address, f"llm/baton-{name}") for name in ("router", "worker")}

        chart = f"oci://{address}/llm/charts/baton"
        verified = ("--plain-http", "--verify", "--keyring", home / "public")
        pulled = run_helm("pull", chart, *verified, "--destination", tmp_path)
        assert pulled.returncode == 0, pulled.stderr
        (package,) = tmp_path.glob("baton-*.tgz")
        shown = yaml.safe_load(run_helm("show", "values", package).stdout)["image"]
        assert shown["registry"] == f"{address}/llm"
        assert {name: shown[name]["digest"] for name in digests} == digests
        rendered = run_helm("template", "demo", chart, *verified, "--kube-version", "1.36.0").stdout
        for name, digest in digests.items():
            assert f"image: {address}/llm/baton-{name}@{digest}\n" in rendered
        # A chart that is not the signed one is refused.
        package.write_bytes(package.read_bytes() + b"\0")
        checked = run_helm("verify", package, "--keyring", home / "public")
        assert checked.returncode != 0
    assert (CHART / "values.yaml").read_text() == before


def digest_at(address: str, name: str) -> str:
    """The digest of an image in the registry."""
    kinds = "application/vnd.oci.image.manifest.v1+json"
    asked = urllib.request.Request(
        f"http://{address}/v2/{name}/manifests/{VERSION}", headers={"Accept": kinds}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert json.load(answer)["schemaVersion"] == 2
        return str(answer.headers["Docker-Content-Digest"])


def test_publish_needs_a_key_and_a_registry() -> None:
    script = ROOT / "helm" / "publish.sh"
    without = {key: value for key, value in os.environ.items() if key != "GPG_KEY"}
    for arguments, code, said in (
        ([], 2, "publish.sh REGISTRY"),
        (["a", "--http"], 2, "publish.sh REGISTRY"),
        (["registry.example"], 2, "GPG_KEY: the name of the secret key"),
    ):
        done = subprocess.run([script, *arguments], env=without, capture_output=True, text=True)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_publish_reads_digests_that_docker_tells(tmp_path: Path) -> None:
    digest = f"sha256:{7:064}"
    stubs = {
        "docker": f'echo "$2" >> pushed; echo "{VERSION}: digest: {digest} size: 740"',
        "gpg": "exit 0",
        "helm": '[ "$1" = push ] || cp "$2/values.yaml" .; echo "$@" >> told',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / "helm" / "publish.sh", "registry.example/llm"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "GPG_KEY": "releases",
            "RUNBOOK_URL": "https://docs.example/operations.html",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    images = [f"registry.example/llm/baton-{name}:{VERSION}" for name in ("router", "worker")]
    assert (tmp_path / "pushed").read_text().split() == images
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    image = values["image"]
    assert [image[name]["digest"] for name in ("router", "worker")] == [digest, digest]
    assert values["monitoring"]["runbookUrl"] == "https://docs.example/operations.html"
    assert "--sign --key releases" in (tmp_path / "told").read_text()
    assert "oci://registry.example/llm/charts\n" in (tmp_path / "told").read_text()
