"""The one door to transformers: everything of it that the engine uses comes through here.

transformers asks whether a third-party package called `kernels` is installed, and takes ours for it
once our version falls into the range it wants. It asks through `is_kernels_available`, which
remembers its first answer; so it is asked here first, while `kernels` cannot be found.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def _settle_kernels_probe() -> None:
    ours = sys.modules.get("kernels")
    # None in sys.modules makes importlib report the name as not installed.
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        from transformers.utils.import_utils import is_kernels_available

        is_kernels_available()
    finally:
        del sys.modules["kernels"]
        if ours is not None:
            sys.modules["kernels"] = ours


_settle_kernels_probe()

from transformers import (  # noqa: E402
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402
from transformers.utils import logging as _logging  # noqa: E402

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
    """Keeps transformers from drawing on the terminal; callers report progress themselves."""
    was_enabled = _logging.is_progress_bar_enabled()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            _logging.enable_progress_bar()
