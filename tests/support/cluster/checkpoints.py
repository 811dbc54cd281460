"""Small random checkpoints of several families, and what transformers makes of them.

Their tokenizer is the shipped model's, so that a router can serve them.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from baton.models import locate
from baton.sampling import EarlyStopping, SamplingParams

_EARLY_STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.FIRST: True,
    EarlyStopping.NEVER: "never",
}

VOCAB_SIZE = 3072
MAX_LEN = 256

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral-short-window": {"model_type": "mistral", "sliding_window": 24},
    "mistral-long-window": {"model_type": "mistral", "sliding_window": 4096},
    # Layers that see all, and layers that see little: two cache groups.
    "qwen2-two-groups": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3-two-groups": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def save_checkpoint(family: str, folder: Path) -> None:
    """Writes a random model of the family with decided opinions: few near ties.

    Its end-of-sequence token is the sixth of what it says to `prompt_of(9)`.
    """
    settings = dict(FAMILIES[family])
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=3,
        **settings,
    )
    torch.manual_seed(len(family))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(locate("tiny")) / file, folder)
    end = greedy(str(folder), prompt_of(9), 6)[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


def save_edited(folder: Path, num_rows: int) -> None:
    """Writes the shipped model with these first rows of one matrix changed."""
    shutil.copytree(locate("tiny"), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    weights = load_file(file)
    changed = weights[name].clone()
    changed[:num_rows] *= -1
    save_file({**weights, name: changed}, file, {"format": "pt"})


def description_that_advises(folder: Path, **advice: float) -> str:
    """Writes the shipped model's description, without weights, and the sampling parameters that it
    advises; returns it as a router's setting `model`."""
    shutil.copytree(locate("tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **advice}))
    return f"tiny={folder}"


@cache
def reference(model: str) -> Any:
    """The checkpoint in transformers: eager attention, float32, and no token that ends it."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    loaded.generation_config.eos_token_id = None
    return loaded.eval()


def greedy(model: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Returns the tokens with which transformers' `generate` continues the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode(), _one_thread():
        out = reference(model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=3,
        )
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation


def is_greedy(model: str, prompt: list[int], tokens: list[int]) -> bool:
    """Whether transformers continues the prompt with these tokens: each is its choice after those
    before it, which one forward pass tells."""
    with torch.inference_mode(), _one_thread():
        logits = reference(model)(torch.tensor([prompt + tokens])).logits[0]
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return choices == tokens


@contextmanager
def _one_thread() -> Iterator[None]:
    """Leaves the cores to the workers, which may be busy with what was not waited for."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, special ones excluded."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(8, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def beams(
    model: str, prompt: list[int], params: SamplingParams
) -> list[tuple[tuple[int, ...], float]]:
    """The sequences that the beam search of transformers returns, with their scores, best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode(), _one_thread():
        out = reference(model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=_EARLY_STOPPING[params.early_stopping],
            pad_token_id=3,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = out.sequences[:, len(prompt) :].tolist()
    return [
        (tuple(tokens), score)
        for tokens, score in zip(sequences, out.sequences_scores.tolist(), strict=True)
    ]
