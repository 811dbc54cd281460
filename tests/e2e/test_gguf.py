"""Cluster of a GGUF file: a chat over HTTP, its prompt computed by one worker and its answer by
another, as transformers answers with the same file."""

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.cli.local.local_cluster import LocalCluster
from baton.models import locate
from tests.support.cluster.scraped import scrape
from tests.support.cluster.wide import HANDOFFS
from tests.support.gguf.caches import own_cache
from tests.support.gguf.vocabularies import byte_level
from tests.support.gguf.writing import write_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 24
MESSAGES = [{"role": "user", "content": "def split(text):\n    return text." * 4}]


def answer_of_transformers(file: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(
        **prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=[0, 2], pad_token_id=3
    )
    text: str = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_cluster_of_gguf_answers_chat_as_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path)))
    file = tmp_path / "Tiny-Q8_0.gguf"
    model = AutoModelForCausalLM.from_pretrained(locate("tiny"), dtype=torch.float32)
    write_gguf(file, model, byte_level(), lambda _name: "Q8_0")
    question = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS}
    flags = {"dtype": "float32"}
    with LocalCluster(str(file), http_port=0, worker_flags=flags, router_flags=HANDOFFS) as cluster:
        models = httpx.get(f"{cluster.http_address}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["Tiny-Q8_0"]
        answer = httpx.post(
            f"{cluster.http_address}/v1/chat/completions",
            json={**question, "model": "Tiny-Q8_0"},
            timeout=60,
        ).json()
        name = "baton_kv_transfer_bytes_total"
        assert scrape(cluster.metrics_endpoints["decode-0"])[name].total(name) > 0
    assert answer["choices"][0]["message"]["content"] == answer_of_transformers(file)
    (folder,) = (tmp_path / "cache/baton/gguf").iterdir()
    assert folder.name.startswith("Tiny-Q8_0-")
