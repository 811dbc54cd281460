"""Memory that plain weights take while they are loaded, before they are packed or go to a GPU."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from baton.engine.executor.models import loader
from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import config_of


def unmapped_bytes() -> int:
    """Returns the bytes of this process that no file backs, which a limit cannot take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_plain_weights_stay_in_their_files_when_loaded(tmp_path: Path) -> None:
    """So the chart lets a worker on a GPU have less memory than the weights."""
    config = small_config("LlamaConfig", hidden_size=1024, vocab_size=40_000)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain = loader.load_config(str(tmp_path))
    before = unmapped_bytes()
    model = loader.load_model(str(tmp_path), plain, config_of(dtype="bfloat16"), "eager")
    loader.check_finite(model)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    assert num_bytes > 100 << 20
    assert unmapped_bytes() - before < num_bytes // 4
