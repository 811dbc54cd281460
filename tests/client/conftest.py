from collections.abc import Iterator

import pytest

from tests.support.router.fake_router import FakeRouter, running


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def address(router: FakeRouter) -> Iterator[str]:
    with running(router) as address:
        yield address
