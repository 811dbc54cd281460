from pathlib import Path

import pytest

from baton.errors import FailedPreconditionError
from baton.settings.loading import load
from baton_router.process import serve
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_router.settings import RouterSettings
from tests.support.router.front import NO_REDIS


def test_placement_setting_defaults_to_baton():
    assert load(RouterSettings, []).placement == "baton"
    for name in POLICY_NAMES:
        assert load(RouterSettings, ["--placement", name]).placement == name


def test_placement_setting_refuses_unknown_policy_with_names(capsys):
    with pytest.raises(SystemExit):
        load(RouterSettings, ["--placement", "random"])
    said = capsys.readouterr().err
    assert "--placement is 'random'" in said
    assert all(name in said for name in POLICY_NAMES)


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_settings_refuse_unknown_format_with_names(capsys, flag):
    with pytest.raises(SystemExit):
        load(RouterSettings, [flag, "yaml"])
    said = capsys.readouterr().err
    assert f"{flag} is 'yaml'; expected one of" in said
    assert "auto, none" in said


def test_models_have_the_names_of_their_checkpoints():
    given = ["Qwen/Qwen3-0.6B@v2", "./folder/", "x=org/one", "y=org/one", "z=tiny"]
    settings = load(RouterSettings, ["--model", ",".join(given)])
    assert settings.names_of_checkpoints == {
        "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
        "./folder": "folder",
        "org/one": "x",
        "tiny": "z",
    }


def test_chat_template_is_of_the_only_model():
    assert load(RouterSettings, []).chat_templates == {}
    given = load(RouterSettings, ["--chat-template", "a.jinja"])
    assert given.chat_templates == {"tiny": Path("a.jinja")}
    named = load(RouterSettings, ["--chat-template", "tiny=a=b.jinja"])
    assert named.chat_templates == {"tiny": Path("a=b.jinja")}


def test_chat_templates_of_several_models_are_named():
    models = ["--model", "a=tiny", "--model", "b=shapes"]
    given = load(RouterSettings, [*models, "--chat-template", "b=b.jinja,a=a.jinja"])
    assert given.chat_templates == {"a": Path("a.jinja"), "b": Path("b.jinja")}


async def test_router_refuses_chat_template_that_cannot_be_read(tmp_path):
    template = str(tmp_path / "own.jinja")
    settings = load(RouterSettings, ["--redis-url", NO_REDIS, "--chat-template", template])
    with pytest.raises(FailedPreconditionError, match="cannot read the chat template"):
        await serve(settings)


@pytest.mark.parametrize(
    "template",
    [
        "x.jinja",
        "a",
        "a=x.jinja,b",
        "c=x.jinja",
        "a=x.jinja,a=y.jinja",
    ],
)
def test_chat_template_is_refused_if_its_model_is_unclear(capsys, template):
    with pytest.raises(SystemExit):
        load(RouterSettings, ["--model", "a=tiny,b=shapes", "--chat-template", template])
    said = capsys.readouterr().err
    assert f"--chat-template is {template!r}; expected NAME=FILE,NAME=FILE with each name" in said


def test_formats_are_detected_unless_named():
    assert load(RouterSettings, []).format_names == ("auto", "auto")
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    assert load(RouterSettings, flags).format_names == ("hermes", None)
