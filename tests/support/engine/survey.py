"""Survey of model families: each is served equal to transformers, or refused with the reason.

    python -m tests.support.engine.survey

surveys all of them and writes `docs/model_families.json`, from which `docs/generate.py` makes the
page of model families.
"""

import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig
from transformers.utils import logging

from baton.engine.llm import GenerationResult
from baton.errors import UnsupportedModelError
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, save_random
from tests.support.engine.engines import assert_idle, load
from tests.support.engine.oracle import Oracle
from tests.support.engine.small_configs import MODEL_TYPES, small_config
from tests.support.repository import ROOT

TABLE = ROOT / "docs" / "model_families.json"
SERVED = "served"

_LENGTHS = (37, 7, 1, 22)
_NUM_SHARED = 18
_NUM_TOKENS = 8
# Sentences of refusals for which a model need not run, or does not exist.
_BY_CONFIGURATION = (
    # A draft model, which transformers runs beside another one alone.
    "shared_kv_states cannot be None|"
    "encoder-decoder|no attention heads|AutoModelForCausalLM has none|transformers cannot build"
)
# How much less likely than the greedy token one may be, relative to the spread of the logits.
_BOUND = 1e-4


def survey(model_type: str, folder: Path, rng: random.Random) -> str:
    """Returns "served", or the sentence with which the engine refuses a small checkpoint of a
    family, without its figures. Raises `AssertionError` if an output is not that of transformers.

    Args:
        folder: where the checkpoint is written.
        rng: draws the prompts.
    """
    _write(small_config(model_type), folder)
    prompts, oracle = _prompts(rng), Oracle()
    try:
        engine = load(
            str(folder), block_size=4, max_num_batched_tokens=11, max_num_seqs=3, max_model_len=64
        )
    except UnsupportedModelError as refusal:
        return _outcome(refusal, oracle, str(folder), prompts[0])
    params = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    scored = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    for result in engine.generate(prompts, scored):
        check_prompt_logprobs(oracle, str(folder), result)
        check_tokens(oracle, str(folder), result)
    again = engine.generate(prompts, params)
    for result in again:
        check_tokens(oracle, str(folder), result)
    assert sum(result.num_cached_tokens for result in again) > sum(_LENGTHS) / 2
    assert_idle(engine)
    return SERVED


def _outcome(
    refusal: UnsupportedModelError, oracle: Oracle, path: str, prompt: tuple[int, ...]
) -> str:
    """Returns the refusal. Asserts that the model is one that transformers runs, where the refusal
    is not by its configuration alone."""
    if not re.search(_BY_CONFIGURATION, str(refusal)):
        oracle.model(path)(input_ids=torch.tensor([prompt]), use_cache=False)
    # transformers names the first of the libraries that happens to be missing.
    text = re.sub(r"requires the \S+ library.*", "requires a library not installed", str(refusal))
    return re.sub(r"differ by \S+ of", "differ by … of", text)


def _write(config: PretrainedConfig, folder: Path) -> None:
    """Writes a random checkpoint; one without weights if transformers cannot build the model."""
    try:
        save_random(config, folder)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        config.save_pretrained(folder)
        save_file({}, folder / "model.safetensors", {"format": "pt"})


def _prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """Returns prompts of different lengths, of which the longest two begin alike."""
    longest, *others = (
        tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length)) for length in _LENGTHS
    )
    return [longest, *others[:-1], longest[:_NUM_SHARED] + others[-1][_NUM_SHARED:]]


def check_prompt_logprobs(oracle: Oracle, path: str, result: GenerationResult) -> None:
    """Asserts that the log-probabilities of a prompt are those of transformers."""
    first, *others = result.prompt_token_ids
    got = [scores.logprob for scores in result.prompt_logprobs]
    oracle.check_logprobs(path, [first], others, got)


def check_tokens(oracle: Oracle, path: str, result: GenerationResult) -> None:
    """Asserts that the tokens are greedy ones of transformers, up to the first toss-up."""
    count = len(result.token_ids)
    answer = oracle.generate(path, result.prompt_token_ids, count, None, output_logits=True)
    for token_id, row in zip(result.token_ids, answer.logits, strict=True):
        if token_id != row[0].argmax():
            short_of = ((row[0].max() - row[0, token_id]) / row[0].std()).item()
            assert short_of < _BOUND, f"a token is {short_of:.2g} less likely than the greedy one"
            return


def main(model_types: Sequence[str] = MODEL_TYPES) -> None:
    """Surveys the families; writes the table if all of them were surveyed and none is wrong."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table, wrong, began = {}, [], time.monotonic()
    for model_type in model_types:
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                table[model_type] = survey(model_type, Path(folder), random.Random(model_type))
            except Exception as error:
                wrong.append(model_type)
                table[model_type] = f"WRONG {type(error).__name__}: {error}"
        print(f"{time.monotonic() - since:5.1f} s  {model_type}: {table[model_type]}", flush=True)
    num_served = sum(outcome == SERVED for outcome in table.values())
    print(f"{time.monotonic() - began:.0f} s: {num_served} of {len(table)} served")
    if wrong:
        sys.exit(f"neither served as transformers does nor refused: {', '.join(wrong)}")
    if list(model_types) == MODEL_TYPES:
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or MODEL_TYPES)
