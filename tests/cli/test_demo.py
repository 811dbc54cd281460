import signal

import pytest

from tests.cli.conftest import baton, gone, interrupt, running, started
from tests.support.readme import OUTPUTS, shows

pytestmark = pytest.mark.e2e


def test_demo_prints_what_the_readme_shows() -> None:
    ended = baton("demo", COLUMNS="120")
    assert ended.returncode == 0, ended.stderr
    assert shows(OUTPUTS["make demo"], ended.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_demo_leaves_no_process_when_interrupted(signum: int) -> None:
    with running("demo") as demo:
        processes = started(demo, 5)
        interrupt(demo, signum)
        assert demo.returncode == 130
        assert gone(processes)
