import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedModelError
from baton.models import locate
from baton.sampling import NO_DEFAULTS, SamplingDefaults
from baton_router.text.model_card import read_model_card


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model without its weights."""
    copy = tmp_path / "some-model"
    shutil.copytree(locate("tiny"), copy, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    return copy


def edit(file: Path, **changes: object) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_model_card_of_shipped_model_matches_its_files():
    card = read_model_card(locate("tiny"))
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    assert (card.vocab_size, card.max_model_len) == (3072, 2048)
    assert card.eos_token_ids == {0, 2}
    assert card.special_tokens["eos_token"] == "<|endoftext|>"


def test_model_card_hashes_tokenizer_file(folder):
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()[:16]
    assert read_model_card(str(folder)).tokenizer_hash == digest


def test_model_card_has_what_generation_config_advises(folder):
    assert read_model_card(str(folder)).sampling_defaults == NO_DEFAULTS
    advised = {"temperature": 1, "top_k": -1, "top_p": 0.95, "min_p": None, "do_sample": False}
    edit(folder / "generation_config.json", **advised)
    expected = SamplingDefaults(temperature=1.0, top_k=0, top_p=0.95)
    assert read_model_card(str(folder)).sampling_defaults == expected


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1, r"sampling\.temperature: is -1\.0; must be in \[0, 100\]"),
        ("top_p", "0.9", "top_p is '0.9'; expected a number"),
        ("top_k", 2.5, "top_k is 2.5; expected a number"),
        ("min_p", True, "min_p is True; expected a number"),
        ("repetition_penalty", float("nan"), r"sampling\.repetition_penalty: is NaN"),
    ],
)
def test_model_card_refuses_advice_that_no_request_may_have(folder, field, value, said):
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(UnsupportedModelError, match=rf"generation_config\.json.*{said}"):
        read_model_card(str(folder))


YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, 8192),
        ({"rope_scaling": {"type": "yarn", **YARN}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}}, 8192),
        ({"rope_parameters": {"rope_type": "llama3", **YARN}}, 2048),
        ({"rope_scaling": {"type": "yarn", **YARN}, "max_position_embeddings": 9000}, 9000),
    ],
    ids=["yarn", "older", "of-its-positions", "by-layer", "another", "less-than-positions"],
)
def test_model_card_has_the_length_that_yarn_extends(folder, changes, expected):
    edit(folder / "config.json", **{"rope_parameters": None, **changes})
    assert read_model_card(str(folder)).max_model_len == expected


def test_answers_end_by_the_tokenizer_too(folder):
    """A generation configuration may name no end: the model's is taken."""
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    edit(folder / "config.json", eos_token_id=[0, 2])
    edit(folder / "tokenizer_config.json", eos_token="<|pad|>")
    card = read_model_card(str(folder))
    assert card.eos_token_ids == {0, 2, card.tokenizer.token_to_id("<|pad|>")}


def test_files_are_read_as_utf_8_whatever_the_locale(folder):
    (folder / "chat_template.jinja").write_text("é{{ messages[0].content }}", encoding="utf-8")
    edit(folder / "tokenizer_config.json", pad_token="ü")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), ensure_ascii=False), "utf-8")
    read = (
        "import sys; from baton_router.text.model_card import read_model_card\n"
        "card = read_model_card(sys.argv[1])\n"
        "print(ascii([card.chat_template[0], card.special_tokens['pad_token']]))"
    )
    result = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", read, str(folder)],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "['\\xe9', '\\xfc']\n"


HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}<tool_call>arguments{% endif %}<think></think>"
)


def test_chat_template_of_file_replaces_that_of_checkpoint(folder, tmp_path):
    before = read_model_card(str(folder))
    assert (before.tool_format, before.reasoning_format) == (None, None)
    file = tmp_path / "own.jinja"
    file.write_text(HERMES)
    card = read_model_card(str(folder), chat_template=file)
    assert card.render([{"role": "user", "content": "Hé"}]) == "<user>Hé<think></think>"
    assert (card.tool_format, card.reasoning_format) == ("hermes", "think")
    assert card.template_takes_tools
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    file.write_text(strict + HERMES)
    strict_card = read_model_card(str(folder), chat_template=file)
    assert card.templates
    assert card.templates[0].abilities.takes_system
    assert strict_card.templates
    assert not strict_card.templates[0].abilities.takes_system


BAD_TEMPLATES = {
    "no Jinja": (b"{% for m in messages %}\n{{ m.content }", "fails: unexpected '}'"),
    "no message": (b"hello", "leaves out the message's text; expected a Jinja template"),
    "empty": (b"", "leaves out the message's text"),
    "refused": (b"{{ raise_exception('only of the system') }}", "fails: only of the system"),
    "no text": (b"\xff\xfe", "cannot read the chat template in"),
}


@pytest.mark.parametrize(("content", "problem"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_chat_template_of_file_is_refused_with_the_reason(folder, tmp_path, content, problem):
    file = tmp_path / "own.jinja"
    file.write_bytes(content)
    with pytest.raises(FailedPreconditionError, match=r"own\.jinja") as caught:
        read_model_card(str(folder), chat_template=file)
    assert problem in str(caught.value)


def test_chat_template_that_is_no_file_is_refused(folder, tmp_path):
    for file in (tmp_path / "missing.jinja", tmp_path):
        with pytest.raises(FailedPreconditionError, match="cannot read the chat template"):
            read_model_card(str(folder), chat_template=file)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_model_card_refuses_folder_without_needed_file(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(UnsupportedModelError, match=f"holds no {missing}"):
        read_model_card(str(folder))


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_model_card_refuses_config_without_needed_key(folder, key):
    edit(folder / "config.json", **{key: None})
    with pytest.raises(UnsupportedModelError, match=key):
        read_model_card(str(folder))


def test_model_card_bounds_what_a_nested_config_leaves_out(folder):
    whole = read_model_card(str(folder))
    nested = {"model_type": "gemma3_text", "hidden_size": 64}
    edit(folder / "config.json", vocab_size=None, max_position_embeddings=None, text_config=nested)
    card = read_model_card(str(folder))
    assert card.vocab_size == whole.tokenizer.get_vocab_size()
    assert card.max_model_len == 2**20


def test_model_card_refuses_file_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_model_card(str(folder))


def test_model_card_refuses_unreadable_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        read_model_card(str(folder))


def test_model_card_takes_end_tokens_of_generation_config(folder):
    """And that of the tokenizer, 0."""
    edit(folder / "generation_config.json", eos_token_id=9)
    assert read_model_card(str(folder)).eos_token_ids == {0, 9}
    (folder / "generation_config.json").unlink()
    assert read_model_card(str(folder)).eos_token_ids == {0, 2}


def test_model_card_prefers_chat_template_in_own_file(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    card = read_model_card(str(folder))
    assert card.render([{"role": "user", "content": "hi"}]) == "hi<|endoftext|>"


def test_model_card_refuses_chat_without_template(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        read_model_card(str(folder)).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at_all }}",
        "{% if %}",
    ],
    ids=["refusal", "undefined", "syntax"],
)
def test_model_card_reports_template_error_as_invalid_argument(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidArgumentError, match=r"input\.chat\.messages"):
        read_model_card(str(folder)).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
        "{{ lipsum.__globals__['os'].system('touch MARK') }}",
        "{% include '/etc/hostname' %}",
        "{{ ('{0.__globals__[sys]}' | attr('format'))(raise_exception) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
    ids=["classes", "globals", "functions", "files", "format", "endless"],
)
def test_chat_template_reaches_only_its_arguments(folder, template):
    marker = folder / "it_ran"
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(marker)))
    with pytest.raises(InvalidArgumentError, match=r"input\.chat\.messages"):
        read_model_card(str(folder)).render([{"role": "user", "content": "hi"}])
    assert not marker.exists()


def test_model_card_refuses_path_of_no_folder_or_model():
    with pytest.raises(UnsupportedModelError, match=r"folder .* does not exist"):
        read_model_card("./no/such/folder")
