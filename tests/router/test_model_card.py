import hashlib
import json
import shutil
from pathlib import Path

import pytest

from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.models import locate
from baton_router.intake.model_card import read_model_card


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


def test_the_shipped_model_s_card_is_what_its_files_say():
    card = read_model_card(locate("tiny"))
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    assert (card.vocab_size, card.max_model_len) == (3072, 2048)
    assert card.eos_token_ids == {0, 2}
    assert card.special_tokens["eos_token"] == "<|endoftext|>"


def test_the_tokenizer_hash_is_that_of_the_file(folder):
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()[:16]
    assert read_model_card(str(folder)).tokenizer_hash == digest


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_needed_file_is_refused_by_name(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(UnsupportedModelError, match=f"holds no {missing}"):
        read_model_card(str(folder))


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_configuration_without_a_needed_key_is_refused_by_name(folder, key):
    edit(folder / "config.json", **{key: None})
    with pytest.raises(UnsupportedModelError, match=key):
        read_model_card(str(folder))


def test_a_file_that_is_not_json_is_refused_by_name(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_model_card(str(folder))


def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        read_model_card(str(folder))


def test_the_generation_configuration_decides_the_end_tokens(folder):
    edit(folder / "generation_config.json", eos_token_id=9)
    assert read_model_card(str(folder)).eos_token_ids == {9}
    (folder / "generation_config.json").unlink()
    assert read_model_card(str(folder)).eos_token_ids == {0, 2}


def test_a_template_in_its_own_file_goes_before_the_configuration_s(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    card = read_model_card(str(folder))
    assert card.render([{"role": "user", "content": "hi"}]) == "hi<|endoftext|>"


def test_a_model_without_a_template_refuses_conversations(folder):
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
def test_what_a_template_refuses_is_the_caller_s_mistake(folder, template):
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
        "{% for i in range(10**9) %}{% endfor %}",
    ],
    ids=["classes", "globals", "functions", "files", "endless"],
)
def test_a_template_reaches_nothing_but_what_it_is_given(folder, template):
    marker = folder / "it_ran"
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(marker)))
    with pytest.raises(InvalidArgumentError, match=r"input\.chat\.messages"):
        read_model_card(str(folder)).render([{"role": "user", "content": "hi"}])
    assert not marker.exists()


def test_a_path_that_is_neither_folder_nor_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="neither a folder nor a model"):
        read_model_card("./no/such/folder")
