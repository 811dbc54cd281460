"""Imports that documents show."""

import re

import baton
from tests.support.documents import PAGES

# Interfaces of packages that a user extends, and the errors.
_PACKAGES = ("baton.errors", "baton.engine.scheduler.", "baton.models.shapes.", "baton.v1")


def test_documents_import_public_names_from_baton():
    shown = [
        (module, name.strip())
        for page in PAGES
        for module, names in re.findall(
            r"^from (baton\b[\w.]*) import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in names.split(",")
    ]
    others = {module for module, _ in shown if not module.startswith(_PACKAGES)}
    assert others == {"baton"}
    names = {name for module, name in shown if module == "baton"}
    assert names >= {"Client", "Image", "LLM", "Message", "SamplingParams", "Tool"}
    assert all(getattr(baton, name).__name__ == name for name in names)
