"""GGUF files that are not served, each with the reason, before a process is started."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from baton.engine.llm import LLM
from baton.errors import UnsupportedModelError
from baton.models.gguf.configuration import configuration
from baton.models.gguf.header import read_header
from baton.models.gguf.tensor_types import TENSOR_TYPES, refusal
from baton.models.support import check_model
from tests.support.engine.engines import config_of, mostly_slow
from tests.support.gguf.models import small_gguf
from tests.support.gguf.vocabularies import byte_level, sentence_piece

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
Make = Callable[[Path], object]


def of(**options: object) -> Make:
    return lambda file: small_gguf(file, sentence_piece(), **options)


def cut(num_bytes: int) -> Make:
    def make(file: Path) -> None:
        small_gguf(file, sentence_piece())
        file.write_bytes(file.read_bytes()[:num_bytes])

    return make


def version_1(file: Path) -> None:
    small_gguf(file, sentence_piece())
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\x01" + content[5:])


def two_models(file: Path) -> None:
    for name in ("a-Q8_0.gguf", "b-Q4_0.gguf"):
        small_gguf(file.with_name(name), sentence_piece())


def without_a_part(file: Path) -> None:
    small_gguf(file, sentence_piece(), split_max_tensors=4)
    file.with_name("model-00002-of-00003.gguf").unlink()


FACTORS = {"rope_freqs.weight": np.array([1.0, 3.0, 2.0, 9.0], np.float32)}
REFUSED: dict[str, tuple[Make, str]] = {
    "another format": (lambda f: f.write_bytes(b"GGML" * 9), r"begins with b'GGML'; expected b'GG"),
    "empty": (lambda f: f.write_bytes(b""), "begins with b''; expected b'GGUF'"),
    "pointer": (lambda f: f.write_bytes(POINTER), r"model\.gguf' is a pointer of Git LFS"),
    "cut in its header": (cut(300), r"model\.gguf' ends after 300 bytes, within its header; down"),
    "cut": (cut(-5), r"model\.gguf' has \d+ bytes; its header describes \d+\. Download"),
    "old version": (version_1, r"model\.gguf' is GGUF of version 1; expected 2 or 3: convert"),
    "architecture": (
        of(metadata={"general.architecture": "mamba"}),
        "GGUF files of architecture 'mamba' are not read; expected llama, qwen2, qwen3, .*: give",
    ),
    "tensor type": (
        of(tensors={"more": np.zeros(8, np.float64)}),
        "has a tensor more of type F64, which Baton does not read; the nearest .* is F32",
    ),
    "setting": (
        of(metadata={"llama.attention.scale": 2.0}),
        r"sets llama.attention.scale to 2.0, which Baton does not read from GGUF; give the orig",
    ),
    "experts of another family": (
        of(metadata={"llama.expert_count": 8}), "sets llama.expert_count to 8, which Baton does no",
    ),
    "setting by layer": (
        of(metadata={"llama.feed_forward_length": [96, 48]}), r"feed_forward_length to \[96, 48\]",
    ),
    "scaling": (
        of(metadata={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}),
        "sets llama.rope.scaling.type to 'longrope'",
    ),
    "rotary factors": (of(tensors=FACTORS), r"factors \(rope_freqs.weight\) that are not those of"),
    "two rotary factors": (
        of(tensors={"rope_factors_long.weight": np.ones(4, np.float32)}),
        r"rotary factors of two lengths \(rope_factors_long.weight\)",
    ),
    "no settings": (of(metadata={"llama.block_count": None}), "lacks block_count; download it aga"),
    "no tokenizer": (
        lambda f: small_gguf(f, None),
        r"model\.gguf' has no tokenizer; give a file with one, or the original checkpoint",
    ),
    "kind of tokenizer": (
        lambda f: small_gguf(f, replace(sentence_piece(), kind="rwkv")),
        "has a tokenizer of kind 'rwkv'; expected one of .*gpt2, llama",
    ),
    "split of texts": (
        lambda f: small_gguf(f, replace(byte_level(), split="unheard-of")),
        r"splits texts by the rule 'unheard-of' \(tokenizer.ggml.pre\), which is not known here",
    ),
    "several models": (two_models, "holds 2 GGUF models; give one of them, such as '.*/a-Q8_0.ggu"),
    "missing part": (
        without_a_part, "lacks 1 of 3 files of a GGUF model, model-00002-of-00003.gguf among them",
    ),
}  # fmt: skip
# Told by the process that makes the tokenizer, which takes seconds to start.
AT_CONVERSION = {"kind of tokenizer", "split of texts"}


@pytest.mark.parametrize("name", mostly_slow(REFUSED, *(REFUSED.keys() - AT_CONVERSION)))
def test_gguf_is_refused_before_its_load_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    make, why = REFUSED[name]
    make(folder / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=why) as refusal:
        check_model(str(folder))
    assert len(str(refusal.value).splitlines()) == 1
    assert not list(tmp_path.glob("cache/baton/gguf/*"))


def test_header_with_any_bytes_is_read_or_refused(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "model.gguf", sentence_piece())
    content, source = file.read_bytes(), random.Random(0)
    outcomes = set()
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(source.choice([1, 2, 9])):
            changed[source.randrange(4, 2000)] = source.choice([0, 1, 255, source.randrange(256)])
        file.write_bytes(changed)
        with suppress(UnsupportedModelError):
            outcomes.add(configuration(read_header([file]))["model_type"])
    assert outcomes == {"llama"}


def test_gguf_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    more = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    file = small_gguf(tmp_path / "model.gguf", sentence_piece(), tensors=more)
    check_model(str(file))
    with pytest.raises(UnsupportedModelError, match=r"the tensor blk\.0\.attn_sinks\.weight, fo"):
        LLM.from_pretrained(file, config_of())


def test_gguf_without_a_cache_folder_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_gguf(tmp_path / "model.gguf", sentence_piece())
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(UnsupportedModelError, match=r"cannot write .*; set XDG_CACHE_HOME to a fo"):
        check_model(str(file))


@pytest.mark.parametrize("number", sorted({*GGMLQuantizationType, 4, 5, 31, 99} - {*TENSOR_TYPES}))
def test_refused_tensor_type_names_the_nearest_that_is_read(number: int) -> None:
    said, _, nearest = refusal(number).partition("; the nearest that it reads is ")
    assert said.startswith("of type ")
    assert nearest in {each.name for each in TENSOR_TYPES.values()}
