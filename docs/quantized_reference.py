"""Table of the formats of quantized weights, from the survey of them (`make survey`)."""

import json
from pathlib import Path

from baton.models.quantization import METHODS
from docs.tables import code, table

_SURVEY = Path(__file__).with_name("quantized_formats.json")
_KINDS = ("dense", "experts", "images")

_TEXT = """Checkpoints with quantized weights are served in the formats below, from safetensors and
without the packages that wrote them, as by `baton up --model Qwen/Qwen3-0.6B-FP8`.

Weights are computed while they are loaded, on the CPU, one parameter after the other, and are from
then on plain ones in the dtype of `--dtype`. So they take in memory what the original checkpoint
takes, whatever the files do: of a model of 8 billion parameters 32 GB on a CPU by default, and
16 GB in bfloat16 or float16, the default on a GPU. Loading takes the values of one parameter more.
Activations are not quantized. All else is as of a plain checkpoint: fp8 caches and their scales,
experts, images, `--deterministic`.

Which weights are quantized, and how, the tensors tell that a checkpoint has, layer by layer. A
checkpoint in another format is refused by its name before its weights are read:

```
{refusal}
```

The table is the result of a survey (`make survey`). Of each format and kind of model a small random
checkpoint is served if its greedy tokens and prompt log-probabilities are those of transformers in
float32 with the same values; weights equal those that transformers, or the format's own package,
computes of the same files, bit for bit. Tests repeat it, on CPUs.

- In `fp8` a block at the end of a weight is cut off where the block size does not divide the
  weight, as in DeepSeek V3. transformers 5.24 refuses some such weights, and stretches the blocks
  of others.
- Values of `compressed-tensors`, `gptq` and `awq` are rounded to the dtype of their scales, as
  `dequantize` of transformers and the packages do."""


def formats(refusal: str) -> str:
    """Returns the section of the formats.

    Args:
        refusal: the sentence by which a checkpoint in another format is refused.
    """
    surveyed = json.loads(_SURVEY.read_text(encoding="utf-8"))
    head = (
        "format", "`quant_method`", "bits in files", "CPU, by default", "CPU or GPU, in bfloat16",
        *_KINDS,
    )  # fmt: skip
    rows = [
        (
            name,
            code(row["method"]),
            str(row["bits"]),
            f"{row['bytes']['float32']} bytes",
            f"{row['bytes']['bfloat16']} bytes",
            *(row.get(kind, "") for kind in _KINDS),
        )
        for name, row in sorted(surveyed.items(), key=lambda item: METHODS.index(item[1]["method"]))
    ]
    return "\n\n".join(["## Quantized weights", _TEXT.format(refusal=refusal), table(head, rows)])
