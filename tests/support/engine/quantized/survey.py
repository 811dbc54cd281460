"""Survey of quantized formats: each is served equal to transformers in every kind of model.

    python -m tests.support.engine.quantized.survey

writes `docs/quantized_formats.json` and `docs/gguf_types.json`, from which `docs/generate.py` makes
the tables of formats and of types of GGUF.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from baton.errors import UnsupportedModelError
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load, tokens
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import awkward_prompts
from tests.support.engine.quantized import fp4
from tests.support.engine.quantized.formats import ALL, FORMATS, Packed
from tests.support.engine.quantized.sizes import gguf_sizes, sizes, stored_parts
from tests.support.engine.survey import check_prompt_logprobs, check_tokens
from tests.support.gguf.writing import TYPES
from tests.support.repository import ROOT

TABLE = ROOT / "docs" / "quantized_formats.json"
TABLE_OF_GGUF = ROOT / "docs" / "gguf_types.json"
SERVED = "served"
FAMILIES = {"dense": "llama", "experts": "mixtral", "images": "llava_clip"}
# A format of one family alone, whose experts are quantized.
_OF_ONE_FAMILY = {name: {"experts": "gpt_oss"} for name in fp4.MXFP4}
SURVEYED = [*FORMATS, *fp4.MXFP4]
_NUM_TOKENS = 8
_GREEDY = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
_SCORED = replace(_GREEDY, logprobs=True, prompt_logprobs=0)


def survey(name: str, packed: Packed) -> dict[str, Any]:
    """Returns what the table has of a format: the method that its checkpoints name, the bits of a
    number in their files, what a weight takes there and in memory (`sizes`), and for each kind of
    model "served", or the sentence with which the engine refuses it. Raises `AssertionError` if an
    output is not that of transformers."""
    families = _OF_ONE_FAMILY.get(name, FAMILIES)
    first = next(iter(families.values()))
    return {
        "method": ALL[name].settings["quant_method"],
        "bits": _bits(name, first, packed),
        "bytes": sizes(ALL[name], *packed(name, first)),
        **{kind: _outcome(kind, *packed.with_codes(name, f)) for kind, f in families.items()},
    }


def _bits(name: str, family: str, packed: Packed) -> int:
    """Returns the bits of a number without its scales."""
    parts, weight = stored_parts(ALL[name], *packed(name, family))
    return round(8 * max(part.nbytes for part in parts) / weight.numel())


def _outcome(kind: str, path: str, meant: str) -> str:
    try:
        engine = load(path, block_size=4, max_num_batched_tokens=24, max_num_seqs=3)
    except UnsupportedModelError as refusal:
        return str(refusal)
    if kind == "images":
        text, images = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN}", (image(1), image(2))
        said = tokens(engine.generate([engine.prompt_with_images(text, images)], _GREEDY))
        assert said == [greedy(meant, text, images, _NUM_TOKENS)]
    else:
        oracle = Oracle()
        for result in engine.generate(awkward_prompts(), _SCORED):
            check_tokens(oracle, meant, result)
            check_prompt_logprobs(oracle, meant, result)
            oracle.check_logprobs(meant, result.prompt_token_ids, result.token_ids, result.logprobs)
    assert_idle(engine)
    return SERVED


def main() -> None:
    """Surveys the formats; writes the table."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table = {}
    for name in SURVEYED:
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            table[name] = survey(name, Packed(Path(folder)))
        print(f"{time.monotonic() - since:5.1f} s  {name}: {table[name]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # what is read of a file
        types = {kind: gguf_sizes(kind, Path(folder)) for kind in TYPES}
    for file, content in ((TABLE, table), (TABLE_OF_GGUF, types)):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
