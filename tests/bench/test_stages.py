"""Stages as real processes: those that succeed, fail, hang, die or leave processes behind."""

import signal
from pathlib import Path

import pytest

from bench.stages import Findings, Stage, run_stage
from tests.support.waiting import wait_until

HANG = "sleep 60"
DEAF = "trap '' INT; sleep 60"
INTERRUPTED = "trap 'printf so-far >$0; exit 0' INT; sleep 60 & wait"


def stage(script: str, report: Path, budget: float = 20.0) -> Stage:
    def read() -> Findings:
        return Findings({"report": report.read_text()} if report.exists() else {})

    return Stage("it", ("sh", "-c", script, str(report)), budget, read)


@pytest.mark.parametrize(
    ("script", "failures"),
    [("exit 0", ()), ("exit 3", ("exit status 3",)), ("kill -SEGV $$", ("died of SIGSEGV",))],
)
def test_stage_fails_with_the_status_of_its_command(tmp_path, script, failures):
    assert run_stage(stage(script, tmp_path / "none"), tmp_path / "log").failures == failures


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
def sigint(request):
    """Sets this process's handler of SIGINT: a shell has background processes ignore it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_stage_beyond_its_budget_fails_with_its_report(tmp_path):
    interrupted = stage(INTERRUPTED, tmp_path / "report", budget=1.0)
    # A shell may take its time to end where all cores are used.
    result = run_stage(interrupted, tmp_path / "log", grace=20.0)
    assert result.failures == ("not done after 1 s",)
    assert result.figures == {"report": "so-far"}
    assert result.seconds < 30


def test_stage_that_ignores_its_signal_is_killed(tmp_path):
    deaf = stage(DEAF, tmp_path / "report", budget=0.5)
    result = run_stage(deaf, tmp_path / "log", grace=0.5)
    assert (result.failures, result.figures) == (("not done after 0.5 s",), {})
    assert 1.0 <= result.seconds < 30


@pytest.mark.parametrize("ending", ["exit 0", HANG])
def test_stage_leaves_no_process_however_it_ends(tmp_path, ending):
    script = f"({DEAF}) & printf $! >$0; {ending}"
    result = run_stage(stage(script, tmp_path / "pid", budget=1.0), tmp_path / "log", grace=0.2)
    assert bool(result.failures) == (ending == HANG)
    wait_until(lambda: not runs(int(result.figures["report"])))


def runs(pid: int) -> bool:
    """Returns whether a process exists that is no zombie."""
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_stage_without_a_readable_report_fails(tmp_path):
    def read() -> Findings:
        return Findings({"report": (tmp_path / "none").read_text()})

    command = ("sh", "-c", "echo no GPU; echo >&2 on this machine")
    result = run_stage(Stage("it", command, 20, read), tmp_path / "log")
    (failure,) = result.failures
    assert failure.startswith("left no report: FileNotFoundError")
    assert failure.endswith("its last line: on this machine")
    assert (tmp_path / "log").read_text() == "no GPU\non this machine\n"
