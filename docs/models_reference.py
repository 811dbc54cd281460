"""Reference of model families, from the survey of them (`make survey`)."""

import json
from collections import defaultdict
from pathlib import Path
from textwrap import fill

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.executor.models.quantized.gguf_codes import CODED_TYPES
from baton.errors import UnsupportedModelError
from baton.models.gguf.families import FAMILIES
from baton.models.gguf.tensor_types import TENSOR_TYPES
from baton.models.images.families import VISION_TOWERS
from baton.models.support import check_config
from docs.quantized_reference import SIZES, formats, sizes
from docs.tables import code, page, prose, table

_SURVEY = Path(__file__).with_name("model_families.json")
_GGUF_TYPES = Path(__file__).with_name("gguf_types.json")
_NOT_BUILT = "transformers cannot build the model: "

_MODELS = """```
>>> LLM.from_pretrained("zamba-7b")
{refusal}
```

Baton serves {served} of the {all} families of causal language models in transformers, and refuses
the others at load, in a sentence. These tables are the result of a survey (`make survey`): of each
family, a small random checkpoint is loaded. It is served if its greedy tokens and prompt
log-probabilities are those of transformers in float32, with prompts in chunks, several sequences in
a batch, and prefix hits. A test repeats the survey and compares it with this page.

A checkpoint may have settings that its family's default configuration lacks. The checks at load are
made for each checkpoint again, the numeric one too."""

_SERVED = """Of models that take images or sound, the text is served. Encoders such as BERT need
`is_decoder` in their configuration; without it, tokens see those that follow, and the model is
refused."""

_IMAGES = """These are served with images in prompts ([guide](../guides/images.md)). Other
vision-language models are served for their text, as below, or refused by name. Tests compare small
random checkpoints with transformers, token for token."""

_GGUF = """```bash
baton up --model Qwen3-0.6B-Q8_0.gguf
baton up --model ./folder-with-one
baton up --model Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf
```

A GGUF file is served with the tokenizer and the chat template in it, under its name without
`.gguf`. Of a model in parts, name any of them. On a CPU the layers of Llama, Mistral, Qwen 2 and
Qwen 3 keep weights of {kept} in codes of 8 or 4 bits, as
[above](#quantized-weights); all other weights are dequantized when they are loaded, and take 4
bytes a value or, in bfloat16, 2, whatever the file takes. Answers are those of the model that the
file was made of, up to its quantization; tests compare them token for token.

The first process that meets a file describes it in `$XDG_CACHE_HOME/baton/gguf` (`~/.cache` if
unset), which takes some seconds. Files of other architectures or tensor types, with a setting or a
tensor that has no place in transformers' model, or with an unknown rule by which texts are split,
are refused by name."""

_TYPES = """Types of tensors, any of them in one file, and what a weight takes, as
[above](#quantized-weights):"""

_REFUSED = "An ellipsis stands for a figure that depends on the weights."

_UNKNOWN = (
    "transformers, as the tests install it, builds no small model of these, so that none was tried."
)


def _refusal() -> str:
    """Returns the sentence by which quantized weights are refused that Baton does not read."""
    described = {"quantization_config": {"quant_method": "aqlm"}}
    try:
        check_config({"architectures": ["LlamaForCausalLM"], **described})
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError("AQLM is read")


def models() -> str:
    """Returns the page of the model families."""
    outcomes: dict[str, str] = json.loads(_SURVEY.read_text(encoding="utf-8"))
    types = json.loads(_GGUF_TYPES.read_text(encoding="utf-8"))
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model_type, outcome in outcomes.items():
        groups[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], outcome].append(code(model_type))
    rows = [(code(name), ", ".join(types), text) for (name, text), types in sorted(groups.items())]
    served = [row[:2] for row in rows if row[2] == "served"]
    not_built = [(*row[:2], prose(row[2])) for row in rows if _NOT_BUILT in row[2]]
    refused = [
        (*row[:2], prose(row[2])) for row in rows if row[2] != "served" and _NOT_BUILT not in row[2]
    ]
    num_served = sum(outcome == "served" for outcome in outcomes.values())
    images = [(code(name), ", ".join(map(code, towers))) for name, towers in VISION_TOWERS.items()]
    head = ("architecture", "model types")
    return page(
        "Model families",
        _MODELS.format(
            served=num_served,
            all=len(outcomes),
            refusal=fill(f"baton.errors.UnsupportedModelError: {outcomes['zamba']}", 98),
        ),
        "## Images",
        _IMAGES,
        table(("model type", "vision towers"), images),
        formats(fill(f"baton.errors.UnsupportedModelError: {_refusal()}", 98)),
        "## Served",
        _SERVED,
        table(head, served),
        "## GGUF",
        _GGUF.format(kept=", ".join(map(code, CODED_TYPES))),
        table(
            ("`general.architecture`", "architecture"),
            [(code(name), code(family.architecture)) for name, family in FAMILIES.items()],
        ),
        _TYPES,
        table(
            ("type", *SIZES),
            [(code(kind.name), *sizes(types[kind.name])) for kind in TENSOR_TYPES.values()],
        ),
        "## Refused",
        _REFUSED,
        table((*head, "reason"), refused),
        "## Not surveyed",
        _UNKNOWN,
        table((*head, "reason"), not_built),
    )
