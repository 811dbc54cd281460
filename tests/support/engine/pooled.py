"""Small random checkpoints with a pooled output, and what transformers computes of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from baton.models import locate
from tests.support.engine.checkpoints import FAMILIES, VOCAB_SIZE, randomize

_FLAGS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
}


def save_embedding(
    family: str,
    folder: Path,
    mode: str = "last",
    *,
    normalizes: bool = True,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Writes a random embedding model as sentence-transformers does."""
    _save(AutoModel, _config(family, vocab_size), folder, seed)
    write_modules(folder, mode, normalizes=normalizes)


def write_modules(folder: Path, mode: str = "last", *, normalizes: bool = True) -> None:
    """Writes the files of sentence-transformers beside a checkpoint."""
    kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalizes else 2]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {flag: name == mode for name, flag in _FLAGS.items()}
    pooling = {"word_embedding_dimension": 64, **flags, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def save_scorer(family: str, folder: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
    """Writes a random model with a classification head of one label."""
    config = _config(family, vocab_size)
    config.num_labels = 1
    config.pad_token_id = vocab_size - 1  # of no prompt
    _save(AutoModelForSequenceClassification, config, folder, seed)


def add_tokenizer(folder: Path) -> None:
    """Writes the shipped model's tokenizer beside a checkpoint, so that a router can serve it: as
    one that was saved after it had cut texts, and padded them to the longest of its call."""
    shutil.copy(Path(locate("tiny")) / "tokenizer_config.json", folder)
    tokenizer = Tokenizer.from_file(str(Path(locate("tiny")) / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))


def expected_embeddings(
    folder: Path, prompts: Sequence[Sequence[int]], mode: str = "last", *, normalizes: bool = True
) -> list[torch.Tensor]:
    """Returns the embeddings by transformers in float32, each prompt alone."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            hidden = model(torch.tensor([list(prompt)])).last_hidden_state[0]
        vector = {"last": hidden[-1], "mean": hidden.mean(0), "first": hidden[0]}[mode]
        found.append(torch.nn.functional.normalize(vector, dim=0) if normalizes else vector)
    return found


def expected_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Returns the outputs of the classification head by transformers in float32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([list(p)])).logits[0, 0]) for p in prompts]


def _config(family: str, vocab_size: int) -> PretrainedConfig:
    config = FAMILIES[family]()
    config.vocab_size = vocab_size
    return config


def _save(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
    randomize(model)
    model.save_pretrained(folder)
