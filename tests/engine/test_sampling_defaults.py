"""Offline batches have what the checkpoint advises, unless their caller says otherwise."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from baton.sampling import SamplingDefaults, SamplingParams

PROMPT = [5, 9, 5, 9, 5, 9]


def test_llm_samples_as_the_checkpoint_advises(checkpoints, tmp_path: Path):
    folder = tmp_path / "llama"
    shutil.copytree(checkpoints["llama"], folder)
    advice = {"repetition_penalty": 1.9, "temperature": 0}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM.from_pretrained(folder, EngineConfig(device="cpu")) as llm:
        assert llm.sampling_defaults == SamplingDefaults(temperature=0.0, repetition_penalty=1.9)
        (advised, told, off) = llm.generate(
            [PROMPT] * 3,
            [plain, replace(plain, repetition_penalty=1.9), replace(plain, repetition_penalty=1.0)],
        )
    assert advised.token_ids == told.token_ids != off.token_ids
