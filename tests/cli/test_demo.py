import signal

import pytest

from tests.cli.conftest import baton, gone, interrupt, running, started

pytestmark = pytest.mark.e2e


def test_the_demo_answers_three_prompts_and_finds_the_shared_prefix() -> None:
    ended = baton("demo")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("│")[1:-1] for line in ended.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:3] for row in cells] == [[n, "prefill-0", "decode-0"] for n in "123"]
    cached = [int(row[6]) for row in cells]
    assert cached[0] == 0
    assert cached[1] >= 3 * 16, "several blocks"
    assert all(int(row[8]) > 0 for row in cells), "blocks were handed over"


@pytest.mark.nightly
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_running(signum: int) -> None:
    with running("demo") as demo:
        processes = started(demo, 5)
        interrupt(demo, signum)
        assert demo.returncode == 130
        assert gone(processes)
