"""Paths of GGUF models: files, folders and parts, each described once."""

import os
import shutil
from pathlib import Path

import pytest

from baton.engine.executor.models import loader
from baton.errors import UnsupportedModelError
from baton.models import checkpoint_folder, named
from baton.models.support import check_model
from tests.support.engine.engines import config_of
from tests.support.engine.fingerprints import fingerprint_of
from tests.support.gguf.models import blocks_config, random_model, small_gguf
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf


def described(path: Path) -> Path:
    return checkpoint_folder(str(path), ())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("models/Small-Q8_0.gguf", "Small-Q8_0"),
        ("Small-00001-of-00003.gguf", "Small"),
        ("org/Small-GGUF", "Small-GGUF"),
    ],
)
def test_served_name_of_gguf_has_no_suffix_or_part(model: str, name: str) -> None:
    assert named(model) == (name, model)
    assert named(f"mine={model}") == ("mine", model)


def test_gguf_is_described_once_until_it_changes(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "model.gguf", sentence_piece())
    folder = described(file)
    made = folder.stat().st_ino
    assert described(tmp_path) == described(file) == described(folder) == folder
    assert folder.stat().st_ino == made
    assert (folder / "model.gguf").resolve() == file
    os.utime(file, (0, 0))
    assert described(file) != folder


def test_split_gguf_is_read_by_any_of_its_parts(tmp_path: Path) -> None:
    model = random_model(blocks_config())
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts/model.gguf", model, sentence_piece(), split_max_tensors=16)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert {described(part) for part in parts} == {described(tmp_path / "parts")}
    assert len({fingerprint_of(part) for part in parts}) == 1


def test_gguf_of_other_values_has_another_fingerprint(tmp_path: Path) -> None:
    """A copy elsewhere has the same: workers of two machines pair."""
    types = {"first": "Q8_0", "elsewhere": "Q8_0", "other": "Q4_0"}
    made = {}
    for name, type_name in types.items():
        (tmp_path / name).mkdir()
        small_gguf(
            tmp_path / name / "model.gguf", sentence_piece(), type_of=lambda _, t=type_name: t
        )
        made[name] = fingerprint_of(tmp_path / name)
    assert made["first"] == made["elsewhere"] != made["other"]


def test_gguf_beside_a_description_is_its_weights(tmp_path: Path) -> None:
    """A folder with the files of the original checkpoint, and GGUF in place of its weights."""
    file = small_gguf(tmp_path / "model.gguf", sentence_piece())
    for described_file in described(file).iterdir():
        if described_file.suffix == ".json":
            shutil.copy(described_file, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert described(tmp_path) == tmp_path
    config = loader.load_config(str(tmp_path))
    model = loader.load_model(str(tmp_path), config, config_of(), "eager")
    assert loader.eos_token_ids(config, model) == {7, 9}
    small_gguf(file, sentence_piece(), metadata={"general.architecture": "mamba"})
    with pytest.raises(UnsupportedModelError, match="of architecture 'mamba' are not read"):
        check_model(str(tmp_path))
