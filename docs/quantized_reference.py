"""Table of the formats of quantized weights, from the survey of them (`make survey`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.models.quantization import METHODS
from docs.tables import code, table

_SURVEY = Path(__file__).with_name("quantized_formats.json")
SIZES = ("bytes in files", "bytes, CPU", "codes on a CPU", "bytes, GPU")
"""Heads of the columns of what a weight takes."""
_KINDS = ("dense", "experts", "images")

_TEXT = """Checkpoints with quantized weights are served in the formats below, from safetensors and
without the packages that wrote them, as by `baton up --model Qwen/Qwen3-0.6B-FP8`.

On a CPU the layers of Llama, Mistral, Qwen 2 and Qwen 3, without experts or images, keep their
weights in codes of 8 or 4 bits, which products in C read (in float32 and bfloat16; `--kernels
torch` has none). To the bits of a code come 32 for the scale of each group of inputs, and as many
for its minimum, or zero point, if it has one.

All other weights, and all of them on a GPU, are computed while they are loaded, on the CPU, one
parameter after the other, and are from then on plain ones in the dtype of `--dtype`: they take in
memory what the original checkpoint takes, whatever the files do, 2 bytes each in bfloat16 and 4 in
float32. Loading takes the values of one parameter more. Activations are not quantized. All else is
as of a plain checkpoint: fp8 caches and their scales, experts, images, `--deterministic` on a GPU.

A plain checkpoint is quantized at load by `--quantization int8` or `int4`
([setting](settings.md)).

Which weights are quantized, and how, the tensors tell that a checkpoint has, layer by layer. A
checkpoint in another format is refused by its name before its weights are read:

```
{refusal}
```

The table is the result of a survey (`make survey`). Of each format and kind of model a small random
checkpoint is served if its greedy tokens and prompt log-probabilities are those of transformers in
float32 with the same values; plain weights equal those that transformers, compressed-tensors or
bitsandbytes computes of the same files, bit for bit. Those of `gptq`, `awq`, `auto-round`,
`fbgemm_fp8` and `modelopt`, which these do not read on a CPU, equal values that tests compute by
the formats' descriptions. Tests repeat it, on CPUs.

The columns "bytes" have what a weight of a layer takes with its scales, as measured of those
checkpoints: in files; on a CPU, in a dense model; on a GPU in bfloat16. A group is of so many
weights, of which rows have 64 or 96; the groups of published checkpoints are often larger, such as
of 128, and take less: 0.53 bytes a weight in 4 bits, 1.03 in 8.

- In `fp8` a block at the end of a weight is cut off where the block size does not divide the
  weight, as in DeepSeek V3. transformers 5.24 refuses some such weights, and stretches the blocks
  of others.
- Plain values of `compressed-tensors`, `gptq` and `awq` are rounded to the dtype of their scales,
  as `dequantize` of transformers and the packages do. Those of codes are not, so that both may
  differ by half a unit in the last place of that dtype."""


def sizes(measured: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Returns the cells of `SIZES`."""
    group = measured["group"]
    kept = "plain" if group is None else f"{measured['codes']} bits, groups of {group}"
    in_memory = (f"{measured[device]:.3g}" for device in ("cpu", "gpu"))
    on_cpu, on_gpu = in_memory
    return f"{measured['file']:.3g}", on_cpu, kept, f"{on_gpu}, plain"


def formats(refusal: str) -> str:
    """Returns the section of the formats.

    Args:
        refusal: the sentence by which a checkpoint in another format is refused.
    """
    surveyed = json.loads(_SURVEY.read_text(encoding="utf-8"))
    head = (
        "format", "`quant_method`", "bits in files", *SIZES, *_KINDS,
    )  # fmt: skip
    rows = [
        (
            name,
            code(row["method"]),
            str(row["bits"]),
            *sizes(row["bytes"]),
            *(row.get(kind, "") for kind in _KINDS),
        )
        for name, row in sorted(surveyed.items(), key=lambda item: METHODS.index(item[1]["method"]))
    ]
    return "\n\n".join(["## Quantized weights", _TEXT.format(refusal=refusal), table(head, rows)])
