"""Fixtures of the router's tests."""

import pytest

from baton_router.text.model_card import ModelCard
from tests.support.router.written import calling_card, save_calling_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Card of a model with tools and reasoning."""
    folder = tmp_path_factory.mktemp("model") / "caller"
    save_calling_model(folder)
    return calling_card(folder)
