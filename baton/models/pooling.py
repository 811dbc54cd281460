"""Pooled output of a checkpoint: an embedding, or the score of a pair of texts.

An embedding model has the files of sentence-transformers (`modules.json`), which say how the hidden
states of a prompt become one vector. A scoring model is a `...ForSequenceClassification` with one
label. Knows nothing of torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.errors import UnsupportedModelError
from baton.models import read_json, read_json_list

MODULES = "modules.json"

PooledKind = Literal["embedding", "score"]
PoolingMode = Literal["last", "mean", "first"]

# Modes of sentence-transformers that Baton implements, by their flags and by their names.
_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
_NAMES: Mapping[str, PoolingMode] = {"lasttoken": "last", "mean": "mean", "cls": "first"}
_WIDTHS = ("hidden_size", "n_embd")
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooled output of a model.

    Attributes:
        width: length of the vector; of a score, 1.
        mode: token whose hidden state is taken, or the mean of all.
        normalizes: the vector is scaled to length 1.
    """

    kind: PooledKind
    width: int
    mode: PoolingMode = "last"
    normalizes: bool = False

    @property
    def needs_all_tokens(self) -> bool:
        """True if the hidden states of cached tokens would be missing."""
        return self.mode != "last"


def read_pooling(folder: Path) -> Pooling | None:
    """Returns the pooled output of a checkpoint; None: it generates.

    Raises `UnsupportedModelError` for a way of pooling that is not implemented.
    """
    config = read_json(folder / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith(_CLASSIFIER):
        num_labels = _num_labels(config)
        if num_labels != 1:
            raise UnsupportedModelError(
                f"{architecture} has {num_labels} labels; expected 1, whose output is a score"
            )
        return Pooling("score", 1)
    return _embedding(folder, config) if (folder / MODULES).is_file() else None


def why_not(model: str, pooling: Pooling | None, wanted: PooledKind | None) -> str:
    """Returns the reason why a model does not give what is `wanted`, as a sentence; empty if it
    does. `wanted` None: text. An embedding model scores, too: by the cosine of two embeddings."""
    if pooling is None:
        if wanted is None:
            return ""
        return (
            f"model {model!r} has no pooled output: its checkpoint has neither {MODULES} with a "
            "Pooling module nor a classification head; choose an embedding or a scoring model"
        )
    if wanted is None:
        made = "embeddings" if pooling.kind == "embedding" else "scores"
        return f"model {model!r} makes {made} and generates no text; choose a generative model"
    if wanted == "embedding" and pooling.kind == "score":
        return f"model {model!r} scores pairs of texts and makes no embeddings; use /v1/score"
    return ""


def _num_labels(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(config.get("num_labels") or 2)


def _embedding(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """Returns the pooling of sentence-transformers' files; None if they have no Pooling module."""
    kinds = {}
    for module in read_json_list(folder / MODULES):
        name = str(module.get("type", "")).rpartition(".")[2]
        kinds[name] = str(module.get("path", ""))
    if "Pooling" not in kinds:
        return None
    if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise UnsupportedModelError(
            f"{MODULES} lists {', '.join(unknown)}; expected Transformer, Pooling and Normalize"
        )
    path = kinds["Pooling"]
    if Path(path).name != path or kinds.get("Transformer"):
        raise UnsupportedModelError(
            f"{MODULES} has modules at {sorted(kinds.values())}; expected the Transformer at '' "
            "and the Pooling module in a folder beside it"
        )
    text = config.get("text_config", config)
    width = next((text[name] for name in _WIDTHS if text.get(name)), None)
    if width is None:
        raise UnsupportedModelError(f"the configuration in {str(folder)!r} has no 'hidden_size'")
    mode = _mode(folder / path / "config.json")
    return Pooling("embedding", int(width), mode, "Normalize" in kinds)


def _mode(file: Path) -> PoolingMode:
    config = read_json(file)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes, mode = [named], _NAMES.get(named)
    else:
        modes = [key for key, is_on in config.items() if key in _FLAGS or "_mode_" in key if is_on]
        mode = _FLAGS.get(modes[0]) if len(modes) == 1 else None
    if mode is None:
        raise UnsupportedModelError(
            f"{str(file)!r} pools by {', '.join(modes) or 'nothing'}; expected one of "
            f"{', '.join(_FLAGS)}"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{str(file)!r} leaves prompts out of the mean (include_prompt); not implemented"
        )
    return mode
