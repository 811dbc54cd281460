"""Checkpoint lookup: models shipped with Baton, folders, and the Hugging Face hub."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError

_SHIPPED = {name: Path(__file__).parent / name for name in ("tiny", "shapes")}

DEFAULT_MODEL = "tiny"
# Printed by the commands that serve it.
INTRODUCTION = (
    "The model, tiny, is a 6 MB toy that writes text like Python. "
    "A real one: baton up --model Qwen/Qwen3-0.6B"
)
# What describes a checkpoint, and what its weights are read from.
DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = ("*.safetensors",)
GGUF = ".gguf"
_HUB_ID_PARTS = 2
_GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")  # of a file, or of a part of one
_PART = re.compile(r"-\d{5}-of-")
_POINTER = b"version https://git-lfs.github.com/spec/"


def locate(model: str) -> str:
    """Returns the folder of a shipped model, or `model` itself: a folder or a hub id."""
    return str(_SHIPPED.get(model, model))


def named(model: str) -> tuple[str, str]:
    """Returns the served name and the checkpoint of `NAME=CHECKPOINT`, or of a checkpoint alone,
    which is served under the last part of its path."""
    name, checkpoint = name_and_checkpoint(model)
    return name, locate(checkpoint)


def name_and_checkpoint(model: str) -> tuple[str, str]:
    """Returns what `named` does, with the checkpoint as it is given: not that of a shipped model as
    its folder."""
    name, sign, checkpoint = model.partition("=")
    if sign and not Path(model).exists():
        return name, checkpoint
    return base_name(model), model


def base_name(model: str) -> str:
    """Returns the last part of a model's path or hub id, without what a GGUF file ends in."""
    return _GGUF_ENDING.sub("", Path(hub_id(model)[0]).name)


def hub_id(model: str) -> tuple[str, str | None]:
    """Returns the id and the revision (branch, tag or commit) of `ID@REVISION`; of an id alone and
    of a path the revision is None."""
    name, sign, revision = model.partition("@")
    if not sign or Path(model).exists() or _is_path(name):
        return model, None
    return name, revision


def checkpoint_folder(
    path: str,
    patterns: Sequence[str],
    on_bytes: Callable[[int, int], None] = lambda _here, _all: None,
) -> Path:
    """Returns the folder itself, of a shipped model, the one that describes a GGUF model, or that
    of a hub id's files, which are fetched unless they are in the hub's cache; `ID@REVISION` for a
    branch, a tag or a commit. Raises `UnsupportedModelError` if it is none of these.

    Args:
        on_bytes: called with the bytes that are fetched, and those of all files that are not in the
            cache.
    """
    from baton.models.gguf.description import description_folder, gguf_files

    folder = Path(locate(path))
    if files := gguf_files(folder):
        return description_folder(files)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UnsupportedModelError(f"{path!r} is a file; expected the folder of a checkpoint")
    if folder.suffix == GGUF:
        return _described_on_hub(path, on_bytes)
    model_id, revision = hub_id(path)
    if _is_path(model_id):
        raise UnsupportedModelError(
            f"the folder {path!r} does not exist; expected a checkpoint's folder, a hub id such as "
            "Qwen/Qwen3-0.6B, 'tiny' or 'shapes'"
        )
    from baton.models.download import fetched

    return fetched(model_id, revision, patterns, path, on_bytes)


def _described_on_hub(path: str, on_bytes: Callable[[int, int], None]) -> Path:
    """Returns the folder that describes the GGUF file `ORGANISATION/NAME/FILE.gguf` of the hub,
    whose other parts are fetched with it. Raises `UnsupportedModelError`."""
    from baton.models.download import fetched
    from baton.models.gguf.description import description_folder, gguf_files

    *repository, name = Path(path).parts
    files: Sequence[Path] = ()
    if len(repository) == _HUB_ID_PARTS and not _is_path("/".join(repository)):
        pattern = _PART.sub("-?????-of-", name)
        snapshot = fetched("/".join(repository), None, (pattern,), path, on_bytes)
        files = gguf_files(snapshot / name)
    if not files:
        raise UnsupportedModelError(
            f"there is no file {path!r}; expected a GGUF file here, or one of the Hugging Face hub "
            "as ORGANISATION/NAME/FILE.gguf"
        )
    return description_folder(files)


def _is_path(model: str) -> bool:
    """Returns whether a name can only be that of a folder, or begins with one that is here."""
    parts = Path(model).parts
    is_below = len(parts) == _HUB_ID_PARTS and Path(parts[0]).is_dir()
    looks_like_one = model.startswith((".", "~", "/")) or model.endswith("/")
    return looks_like_one or is_below or len(parts) > _HUB_ID_PARTS


def read_json(file: Path) -> dict[str, Any]:
    """Returns a JSON object. Raises `UnsupportedModelError` if the file has none or is missing."""
    content = _json_of(file)
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{str(file)!r} is not a JSON object; download it again")
    return content


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Returns a JSON list of objects. Raises as `read_json`."""
    content = _json_of(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise UnsupportedModelError(
            f"{str(file)!r} is not a JSON list of objects; download it again"
        )
    return content


def _json_of(file: Path) -> Any:
    if not file.is_file():
        raise UnsupportedModelError(
            f"{str(file.parent)!r} holds no {file.name}; expected a checkpoint's folder, as "
            "model.save_pretrained(folder) writes it"
        )
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        check_is_no_pointer(file)
        raise UnsupportedModelError(
            f"{str(file)!r} is not JSON: {error}; download it again"
        ) from error


def tokenizer_file(folder: Path) -> Path:
    """Returns the file of a checkpoint's tokenizer. Raises `UnsupportedModelError` if it is not
    there, or a pointer to it."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModelError(
            f"{str(folder)!r} holds no tokenizer.json; save the tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    check_is_no_pointer(file)
    return file


def check_is_no_pointer(file: Path) -> None:
    """Raises `UnsupportedModelError` for a file that stands for another one in Git LFS."""
    with file.open("rb") as opened:
        is_pointer = opened.read(len(_POINTER)) == _POINTER
    if is_pointer:
        raise UnsupportedModelError(
            f"{str(file)!r} is a pointer of Git LFS in place of the file; run `git lfs pull` in "
            "its folder"
        )
