import pytest

from baton.serving.settings import load
from baton_router.placement.policy import POLICY_NAMES
from baton_router.settings import RouterSettings


def test_placement_is_by_all_costs_unless_told_otherwise():
    assert load(RouterSettings, []).placement == "baton"
    for name in POLICY_NAMES:
        assert load(RouterSettings, ["--placement", name]).placement == name


def test_another_policy_is_refused_with_the_names_there_are(capsys):
    with pytest.raises(SystemExit):
        load(RouterSettings, ["--placement", "random"])
    said = capsys.readouterr().err
    assert "--placement is 'random'" in said
    assert all(name in said for name in POLICY_NAMES)
