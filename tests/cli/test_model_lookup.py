"""Lookup of a model by its name: in folders, in the hub's cache, and on a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.models import hub_id, locate, named
from baton.models.weights import weight_bytes
from tests.support.gguf.models import small_gguf
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.hub import REVISION, hub_with

LOOKUP = """
import sys
from baton.errors import UnsupportedModelError
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder
try:
    print(checkpoint_folder(sys.argv[1], (*DESCRIPTION, *WEIGHTS)))
except UnsupportedModelError as error:
    print("refused:", error)
"""
FETCH = """
import sys
from baton.cli.main import main
sys.argv = ["baton", "fetch", sys.argv[1]]
main()
"""
LOADING = """
import json, sys
from baton.engine.llm import LLM
phase, told = "", []
def on_progress(name, fraction):
    global phase
    phase = name
def on_bytes(here, all):
    told.append((phase, here, all))
with LLM.from_pretrained(sys.argv[1], on_progress=on_progress, on_loaded_bytes=on_bytes):
    print(json.dumps(told))
"""


def lookup(model: str, folder: Path, program: str = LOOKUP, **variables: str) -> str:
    """Runs a program that looks a model up, in `folder`; it reaches no hub, unless told of one."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(folder / "home")}
    ended = subprocess.run(
        [sys.executable, "-c", program, model],
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
        ("models/none.gguf", "there is no file 'models/none.gguf'; expected a GGUF file here, or"),
        ("models/a/none.gguf", "there is no file 'models/a/none.gguf'; expected a GGUF file here"),
        ("someone/small/q.gguf", "no folder 'someone/small/q.gguf' here, and the Hugging Face hub"),
    ],
    ids=["hub id", "below a folder", "path", "GGUF", "GGUF below", "GGUF of hub"],
)
def test_lookup_names_why_a_model_is_not_found(model: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
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


def test_lookup_finds_a_revision_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    cached = tmp_path / "home/hub/models--someone--small"
    for ref, commit in (("main", REVISION), ("v2", REVISION[::-1])):
        snapshot = cached / "snapshots" / commit
        shutil.copytree(locate("tiny"), snapshot, ignore=shutil.ignore_patterns("__pycache__"))
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / ref).write_text(commit)
    for revision in ("v2", REVISION[::-1]):
        found = lookup(f"someone/small@{revision}", tmp_path, HF_HUB_OFFLINE="1")
        assert found == str(cached / "snapshots" / REVISION[::-1])


def test_names_of_models_have_no_revision(tmp_path: Path) -> None:
    assert named("someone/small@v2") == ("small", "someone/small@v2")
    assert named("mine=someone/small@refs/pr/1") == ("mine", "someone/small@refs/pr/1")
    (tmp_path / "small@2").mkdir()
    for path in (str(tmp_path / "small@2"), "/models/small@2"):
        assert (named(path), hub_id(path)) == (("small@2", path), (path, None))
    assert hub_id("someone/small@refs/pr/1") == ("someone/small", "refs/pr/1")


@pytest.mark.e2e
def test_fetch_downloads_revision_and_names_missing_one(tmp_path: Path) -> None:
    with hub_with("someone/small", Path(locate("tiny"))) as address:
        folder = lookup("someone/small@v2", tmp_path, FETCH, HF_ENDPOINT=address)
        assert (tmp_path / "home/hub/models--someone--small/refs/v2").read_text() == REVISION
        assert Path(folder).name == REVISION
        assert weight_bytes(Path(folder)) == weight_bytes(Path(locate("tiny")))
        refused = lookup("someone/small@v3", tmp_path, HF_ENDPOINT=address)
    assert "no revision 'v3' of 'someone/small'; expected a branch, a tag or a commit" in refused


@pytest.mark.e2e
def test_download_reports_bytes_then_loading_does(tmp_path: Path) -> None:
    tiny = Path(locate("tiny"))
    with hub_with("someone/small", tiny) as address:
        said = json.loads(lookup("someone/small", tmp_path, LOADING, HF_ENDPOINT=address))
    downloading = [(here, size) for phase, here, size in said if phase == "downloading"]
    here, size = downloading[-1]
    assert here == size > weight_bytes(tiny)
    assert downloading == sorted(downloading)
    assert 0 < downloading[0][0] < size
    phase, *loaded = said[-1]
    assert (phase, loaded) == ("loading weights", [weight_bytes(tiny)] * 2)
    assert said.index(said[-1]) > len(downloading)


@pytest.mark.e2e
@pytest.mark.parametrize("parts", [1, 3])
def test_fetch_downloads_gguf_file_with_its_parts(parts: int, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    most = 4 if parts > 1 else 0
    small_gguf(tmp_path / "made/small-Q8_0.gguf", sentence_piece(), split_max_tensors=most)
    made = sorted(file.name for file in (tmp_path / "made").iterdir())
    small_gguf(tmp_path / "made/small-Q8_0_L.gguf", sentence_piece())
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with hub_with("someone/small", tmp_path / "made") as address:
        model = f"someone/small/{made[0]}"
        folder = lookup(model, tmp_path, FETCH, HF_ENDPOINT=address, **cache)
        refused = lookup("someone/small/none.gguf", tmp_path, HF_ENDPOINT=address, **cache)
    assert sorted(file.name for file in Path(folder).glob("*.gguf")) == made
    assert "there is no file 'someone/small/none.gguf'" in refused
    assert named(model)[0] == "small-Q8_0"
