"""Imports from transformers, for the whole engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
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
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "PreTrainedModel",
    "PretrainedConfig",
    "without_progress_bars",
]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disables the progress bars of transformers in a `with` block; callers report progress."""
    was_enabled = _logging.is_progress_bar_enabled()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            _logging.enable_progress_bar()
