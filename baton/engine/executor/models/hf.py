"""Imports from transformers, for the whole engine."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as _logging

__all__ = [
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoTokenizer",
    "GenerationConfig",
    "PreTrainedModel",
    "PretrainedConfig",
    "loading_in_turn",
    "reporting_progress",
    "without_load_report",
]


# Has transformers read no weights ahead in threads.
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
_LOADING = "Loading weights"
"""Description of the progress bar over a model's weights."""


@contextmanager
def reporting_progress(on_fraction: Callable[[float], None]) -> Iterator[None]:
    """Has transformers draw no progress bars in a `with` block. `on_fraction` is called with the
    fraction of the weights that it has loaded."""

    def track(bar: Callable[..., Any], args: Any, options: Any) -> Any:
        return (
            _counted(args[0], on_fraction)
            if _LOADING in options.values()
            else bar(*args, **options)
        )

    was_enabled = _logging.is_progress_bar_enabled()
    _logging.disable_progress_bar()
    former = _logging.set_tqdm_hook(track)
    try:
        yield
    finally:
        _logging.set_tqdm_hook(former)
        if was_enabled:
            _logging.enable_progress_bar()


@contextmanager
def without_load_report() -> Iterator[None]:
    """Has transformers not warn of weights that it lacks or does not use, in a `with` block."""
    former = _logging.get_verbosity()
    _logging.set_verbosity_error()
    try:
        yield
    finally:
        _logging.set_verbosity(former)


@contextmanager
def loading_in_turn() -> Iterator[None]:
    """Has transformers take the weights of one parameter at a time in a `with` block, so that it
    never holds more than the result and what one parameter is made of."""
    former = os.environ.get(_IN_TURN)
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        os.environ.pop(_IN_TURN, None)  # another thread that loads a model may have done so
        if former is not None:
            os.environ[_IN_TURN] = former


def _counted(items: Any, on_fraction: Callable[[float], None]) -> Iterator[Any]:
    for number, item in enumerate(items, 1):
        yield item
        on_fraction(number / len(items))
