import signal

import pytest

from tests.cli.conftest import baton, gone, interrupt, running, started
from tests.support.documents import outputs_of, shows

pytestmark = pytest.mark.e2e


def test_demo_prints_what_the_pages_show() -> None:
    ended = baton("demo", COLUMNS="120")
    assert ended.returncode == 0, ended.stderr
    shown = outputs_of("make demo", "baton demo")
    assert len(shown) > 2
    assert all(shows(output, ended.stdout) for output in shown), ended.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_demo_leaves_no_process_when_interrupted(signum: int) -> None:
    with running("demo") as demo:
        processes = started(demo, 6)
        interrupt(demo, signum)
        assert demo.returncode == 130
        assert gone(processes)
