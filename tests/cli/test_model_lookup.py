"""Lookup of a model by its name, without a network: in folders and in the hub's cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.models import locate

LOOKUP = """
import sys
from baton.errors import UnsupportedModelError
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder
try:
    print(checkpoint_folder(sys.argv[1], (*DESCRIPTION, *WEIGHTS)))
except UnsupportedModelError as error:
    print("refused:", error)
"""
REVISION = "0123456789abcdef0123456789abcdef01234567"


def lookup(model: str, folder: Path, **variables: str) -> str:
    """Looks a model up in a process in `folder`, which reaches no hub."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(folder / "home")}
    ended = subprocess.run(
        [sys.executable, "-c", LOOKUP, model],
        cwd=folder,
        env={**os.environ, **nowhere, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("someone/small", "no folder 'someone/small' here, and the Hugging Face hub cannot be re"),
        ("models/missing", "the folder 'models/missing' does not exist; expected a checkpoint's"),
        ("./missing", "the folder './missing' does not exist; expected a checkpoint's folder"),
        ("models/small.gguf", "'models/small.gguf' is a GGUF file; Baton reads safetensors"),
    ],
    ids=["hub id", "below a folder", "path", "GGUF"],
)
def test_lookup_names_why_a_model_is_not_found(model: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.gguf").write_bytes(b"GGUF")
    assert lookup(model, tmp_path).startswith(f"refused: {sentence}")


@pytest.mark.parametrize("offline", ["0", "1"])
def test_lookup_names_the_missing_network(offline: str, tmp_path: Path) -> None:
    why = {"0": "(no network)", "1": "(HF_HUB_OFFLINE is set)"}[offline]
    assert why in lookup("someone/small", tmp_path, HF_HUB_OFFLINE=offline)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_lookup_finds_a_model_in_the_cache_of_the_hub(offline: str, tmp_path: Path) -> None:
    cached = tmp_path / "home/hub/models--someone--small"
    snapshot = cached / "snapshots" / REVISION
    shutil.copytree(locate("tiny"), snapshot, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(REVISION)
    assert lookup("someone/small", tmp_path, HF_HUB_OFFLINE=offline) == str(snapshot)
