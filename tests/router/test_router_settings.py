import pytest

from baton.settings.loading import load
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_router.settings import RouterSettings


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


def test_formats_are_detected_unless_named():
    assert load(RouterSettings, []).format_names == ("auto", "auto")
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    assert load(RouterSettings, flags).format_names == ("hermes", None)
