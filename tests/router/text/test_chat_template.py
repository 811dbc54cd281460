"""Chat templates: what renderings of short conversations tell of them."""

import pytest

from baton_router.text.template.chat_template import ChatTemplate
from baton_router.text.template.template_probe import TemplateAbilities
from tests.support.router.templates import (
    ALTERNATING,
    DROPPING,
    GENERIC,
    HARMONY_LIKE,
    LAST_SYSTEM,
    NO_SYSTEM,
    STRICT_SYSTEM,
)

ALL = TemplateAbilities()
NO_LATER = TemplateAbilities(takes_repeated_system=False, takes_later_system=False)
ABILITIES = {
    "generic": (GENERIC, ALL),
    "an unknown role is dropped": (DROPPING, ALL),
    "a later system turn is refused": (STRICT_SYSTEM, NO_LATER),
    "the last system turn replaces the others": (LAST_SYSTEM, NO_LATER),
    "developers, at the beginning alone": (
        HARMONY_LIKE,
        TemplateAbilities(
            knows_developer=True, takes_repeated_system=False, takes_later_system=False
        ),
    ),
    "no system": (
        NO_SYSTEM,
        TemplateAbilities(
            takes_system=False, takes_repeated_system=False, takes_later_system=False
        ),
    ),
    "alternating turns": (
        ALTERNATING,
        TemplateAbilities(
            takes_repeated_system=False,
            takes_later_system=False,
            takes_repeated_users=False,
            takes_repeated_answers=False,
            takes_user_before_result=False,
            takes_user_after_result=False,
        ),
    ),
    "one that refuses all": ("{{ raise_exception('no') }}", ALL),
    "no template at all": ("{% if %}", ALL),
}


@pytest.mark.parametrize(("source", "abilities"), ABILITIES.values(), ids=ABILITIES)
def test_template_abilities_are_told_by_its_renderings(source, abilities):
    assert ChatTemplate(source).abilities == abilities


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (GENERIC, {"tool": True, "robot": True}),
        (DROPPING, {"tool": True, "robot": False}),
        (NO_SYSTEM, {"tool": False, "robot": False}),
        (ALTERNATING, {"tool": True, "robot": True}),  # it refuses them itself
    ],
)
def test_template_tells_roles_that_it_drops(source, rendered):
    template = ChatTemplate(source)
    assert {role: template.renders_role(role) for role in rendered} == rendered


def test_template_with_parts_is_asked_in_parts():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
    assert ChatTemplate(source, needs_parts=True).abilities == ALL
