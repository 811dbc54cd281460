"""Generation configuration of a checkpoint: the sampling parameters that its makers advise."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.models import read_json
from baton.sampling import SamplingDefaults, SamplingParams

GENERATION_CONFIG = "generation_config.json"
_INTEGERS = frozenset({"top_k"})
_ALL_TOKENS = -1  # of `top_k`, as vLLM and SGLang write it


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Returns the file's content; empty if the checkpoint has none."""
    file = folder / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Returns the values of sampling parameters for requests that name none. `do_sample` is not
    read, as in vLLM and SGLang: a temperature says it.

    Raises `UnsupportedModelError` for a value that no request may have, with file and field.
    """
    config = read_generation_config(folder)
    names = [each.name for each in fields(SamplingDefaults)]
    given = {name: config[name] for name in names if config.get(name) is not None}
    if given.get("top_k") == _ALL_TOKENS:
        given["top_k"] = 0
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (name in _INTEGERS and value != int(value)):
            raise UnsupportedModelError(_error(folder, f"{name} is {value!r}; expected a number"))
        given[name] = int(value) if name in _INTEGERS else float(value)
    try:
        SamplingParams(**given)
    except InvalidArgumentError as error:
        raise UnsupportedModelError(_error(folder, str(error))) from error
    return SamplingDefaults(**given)


def _error(folder: Path, what: str) -> str:
    return f"{str(folder / GENERATION_CONFIG)!r}: {what}. Correct the file, or leave the field out"
