"""Aliases of models, from a file that is read again after it has changed.

    assistant = "llama-8b"
    [canary]
    llama-8b = 90
    llama-8b-next = 10

An alias stands for one model, or for several by weight. The file is TOML, or JSON if its name ends
in `.json`.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from baton.errors import FailedPreconditionError
from baton.rpc.watched_files import WatchedFiles

Weights = Mapping[str, float]
"""Weight of each model of an alias, by its name."""


def no_aliases() -> Mapping[str, Weights]:
    """Returns the aliases of a router without a file of them."""
    return {}


def watched_aliases(path: Path, models: Collection[str]) -> Callable[[], Mapping[str, Weights]]:
    """Returns a function that returns the aliases of a file, at most a second old. A changed file
    that is invalid leaves the earlier aliases, with one warning.

    Raises `FailedPreconditionError` if the file is invalid now: it cannot be parsed, or an alias is
    the name of one of the `models`, or stands for none of them.
    """
    return WatchedFiles([path], partial(read_aliases, path, models)).current


def read_aliases(path: Path, models: Collection[str]) -> Mapping[str, Weights]:
    """Returns the weights of each alias in a file. Raises as `watched_aliases`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"cannot read the aliases in {path}: {error}") from error
    if not isinstance(content, dict):
        raise FailedPreconditionError(f"{path} is no object; expected models by alias")
    return {alias: _weights(f"{path}: {alias}", alias, of, models) for alias, of in content.items()}


def drawn(weights: Weights, alias: str, request_id: str) -> str:
    """Returns the model that answers a request. It is a function of the arguments alone, so that
    all routers draw alike. While a later model's weight grows and an earlier one's shrinks by as
    much, no request changes from the later model to an earlier one."""
    digest = hashlib.sha256(f"{alias}\0{request_id}".encode(errors="replace")).digest()
    left = int.from_bytes(digest[:8]) / 2**64 * sum(weights.values())
    for model, weight in weights.items():
        left -= weight
        if left < 0:
            return model
    return model


def heaviest(weights: Weights) -> str:
    """Returns the model with the largest weight; the first of several."""
    return max(weights, key=weights.__getitem__)


def _weights(where: str, alias: str, of: Any, models: Collection[str]) -> Weights:
    weights = {of: 1.0} if isinstance(of, str) else of
    if alias in models:
        raise FailedPreconditionError(f"{where} is the name of a model; expected another name")
    if not isinstance(weights, dict) or not weights:
        raise FailedPreconditionError(
            f"{where} is {of!r}; expected a model, or weights by model such as {{ a = 90, b = 10 }}"
        )
    for model, weight in weights.items():
        if model not in models:
            listed = ", ".join(map(repr, models))
            raise FailedPreconditionError(f"{where} names the model {model!r}; expected {listed}")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise FailedPreconditionError(
                f"{where}: the weight of {model!r} is {weight!r}; expected a number above 0"
            )
    return weights
