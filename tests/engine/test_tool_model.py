"""The tool model of the clients' tests, and the program that trains it."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.repository import ROOT
from tests.support.tool_model import CHECKPOINT, FORMATS
from tests.support.tool_model.train import Rows, exact_share


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_tool_model_answers_held_out_conversations(name):
    rows = Rows(AutoTokenizer.from_pretrained(CHECKPOINT))
    model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    assert exact_share(model, rows, name, count=200, seed=1) >= 0.99


@pytest.mark.nightly
def test_training_of_the_tool_model_writes_a_checkpoint(tmp_path):
    train = (sys.executable, "-m", "tests.support.tool_model.train", "--out", tmp_path)
    few = ("--steps", "2", "--check", "8", "--threads", "1")
    done = subprocess.run([*train, *few], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in CHECKPOINT.iterdir()
    }
    assert done.stdout.count("of 8 held-out conversations exact") == len(FORMATS)
