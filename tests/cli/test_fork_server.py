"""Forked processes are what started ones would be: arguments, logs, ends, and nothing left."""

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from baton.cli.local.fork_server import ForkedProcess, ForkServer
from baton.worker.roles import modules
from tests.support.descriptors import descriptors_left
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked so on Linux only"),
]

_PRELOADED = "colorsys"  # that nothing else imports
_MODULE = """
import os, sys, time
print(*sys.argv[1:], os.environ.get("WHAT"), "colorsys" in sys.modules, flush=True)
print("to stderr", file=sys.stderr, flush=True)
time.sleep(float(os.environ["SECONDS"]))
sys.exit(3)
"""
_PARENT = """
import sys, time
from pathlib import Path
from tests.cli.test_fork_server import Nursery
start = Nursery(Path(sys.argv[1]))
print(start(seconds=60.0).pid, flush=True)
time.sleep(60.0)
"""


# What libraries written in C say when the process exits.
_NOISY = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
noise = ctypes.c_void_p(libc.strdup(b"leaked 514 functions!"))
libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), noise, None)
atexit.register(print, "closed")
"""


class Nursery:
    """Starts a module that prints its arguments, and takes so many seconds."""

    def __init__(self, folder: Path, preload: str = _PRELOADED, source: str = _MODULE) -> None:
        self.log = folder / "log"
        self.server = ForkServer([preload])
        self._children: list[ForkedProcess] = []
        (folder / "forked_module.py").write_text(source)

    def __call__(self, *arguments: str, seconds: float = 0.0) -> ForkedProcess:
        environment = {**os.environ, "WHAT": "told", "SECONDS": str(seconds)}
        with self.log.open("ab") as log:
            child = self.server.start("forked_module", arguments, environment, log)
        self._children.append(child)
        return child

    def close(self) -> None:
        self.server.close()
        for child in self._children:
            child.wait(10.0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    monkeypatch.setenv("PYTHONPATH", _path(tmp_path))
    nursery = Nursery(tmp_path)
    yield nursery
    nursery.close()


def test_forked_process_has_own_arguments_log_and_exit_code(start: Nursery) -> None:
    child = start("--port", "1")
    assert child.wait(60.0) == 3
    assert start.log.read_text() == "--port 1 told True\nto stderr\n"
    assert child.poll() == child.returncode == 3


def test_forked_process_can_be_inspected_and_signalled(start: Nursery) -> None:
    child = start("--port", "1", seconds=60.0)
    seen = psutil.Process(child.pid)
    wait_until(lambda: "forked_module --port 1" in " ".join(seen.cmdline()))
    assert os.getpgid(child.pid) == child.pid
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: seen.status() == psutil.STATUS_STOPPED)
    child.send_signal(signal.SIGKILL)
    assert child.wait(10.0) == -signal.SIGKILL
    child.send_signal(signal.SIGKILL)  # to no process


def test_forked_process_tells_each_thread_its_id_and_end(start: Nursery) -> None:
    """Whichever of them takes the server's message."""
    for _ in range(10):
        child = start(seconds=60.0)
        with ThreadPoolExecutor(2) as threads:
            told = [threads.submit(lambda c=child: c.pid) for _ in range(2)]
            while not all(each.done() for each in told):
                assert child.poll() is None
            assert {each.result() for each in told} == {child.pid}
            ends = [threads.submit(child.wait, 60.0) for _ in range(2)]
            child.send_signal(signal.SIGKILL)
            while child.poll() is None:
                pass
            assert [each.result() for each in ends] == [-signal.SIGKILL] * 2


def test_forked_process_inherits_no_files_of_its_siblings(start: Nursery) -> None:
    first = start(seconds=60.0)
    second = start(seconds=60.0)
    # Before that a process has the file of its module open for a moment.
    wait_until(lambda: start.log.read_text().count("to stderr") == 2)
    descriptors = [
        sorted(p.name for p in Path(f"/proc/{child.pid}/fd").iterdir()) for child in (first, second)
    ]
    assert descriptors[0] == descriptors[1]


def test_fork_server_skips_child_killed_before_its_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", _path(tmp_path))
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(1.0)")
    start = Nursery(tmp_path, preload="slow_import")
    child = start(seconds=60.0)
    child.send_signal(signal.SIGKILL)  # the server is still importing
    assert child.returncode == -signal.SIGKILL
    assert child.pid == 0
    assert start().wait(60.0) == 3
    assert start.log.read_text().count("told") == 1
    start.close()


@pytest.mark.parametrize("num_left", [0, 1, 2], ids="for its {}".format)
def test_failed_start_ends_no_other_forked_process(start: Nursery, num_left: int) -> None:
    """One without a socket, a log, or a descriptor of the process."""
    other = start(seconds=60.0)
    server = psutil.Process(psutil.Process(other.pid).ppid())
    # It closes the log of a child after it has named the child.
    wait_until(lambda: server.status() == psutil.STATUS_SLEEPING)
    with descriptors_left(server.pid, num_left):
        failed = start()
        assert failed.wait(60.0) == os.EX_OSERR
        assert failed.pid == 0
    assert "baton: cannot fork this process: " in start.log.read_text()
    assert other.poll() is None
    assert start().wait(60.0) == 3


@pytest.mark.parametrize("num_left", range(4))
def test_start_without_descriptors_asks_for_no_child(start: Nursery, num_left: int) -> None:
    before = psutil.Process().num_fds()
    with descriptors_left(os.getpid(), num_left), pytest.raises(OSError, match="open files"):
        start()
    gc.collect()
    assert psutil.Process().num_fds() == before
    assert start().wait(60.0) == 3
    assert start.log.read_text().count("told") == 1


def test_forked_process_is_killed_without_a_descriptor_left(start: Nursery) -> None:
    child = start(seconds=60.0)
    with descriptors_left(os.getpid(), 0):
        assert child.pid > 0
        assert child.poll() is None
        child.send_signal(signal.SIGKILL)
    assert child.wait(10.0) == -signal.SIGKILL


def test_forked_process_is_killed_above_1024_descriptors(start: Nursery) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        child = start(seconds=60.0)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        assert child.pid > 0
        child.send_signal(signal.SIGKILL)
        assert child.wait(10.0) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("ending", "code", "log"),
    [
        ("sys.exit('the reason')", 1, "the reason\nclosed\n"),
        ("sys.exit()", 0, "closed\n"),
        ("pass", 0, "closed\n"),
        ("raise ValueError('odd')", 1, "ValueError: odd\nclosed\n"),
    ],
)
def test_forked_process_ends_with_its_own_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, code: int, log: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", _path(tmp_path))
    start = Nursery(tmp_path, source=_NOISY + ending)
    assert start().wait(60.0) == code
    assert start.log.read_text().endswith(log)
    start.close()


def test_forked_processes_end_with_the_fork_server(start: Nursery) -> None:
    child = start(seconds=60.0)
    seen = psutil.Process(child.pid)
    server = seen.parent()
    assert server is not None
    server.kill()
    assert child.wait(10.0) == -signal.SIGKILL
    wait_until(lambda: not seen.is_running() or seen.status() == psutil.STATUS_ZOMBIE)
    assert not start.server.is_running


def test_forked_processes_end_with_the_parent_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": _path(tmp_path, ROOT)}
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        server = child.parent()
        assert server is not None
        parent.kill()
    wait_until(lambda: not (child.is_running() or server.is_running()))


def _path(*folders: Path) -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([before] if before else [])])


def test_fork_server_is_shared_in_equal_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without starting any: the server of this process has nothing to do."""
    first = ForkServer.shared(modules())
    other = ForkServer.shared(["json"])
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert ForkServer.shared(modules()) is first
    assert ForkServer.shared(["json"]) is other is not first
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    second = ForkServer.shared(modules())
    assert second is not first
    assert first is not None
    assert first.is_running
    monkeypatch.undo()
    assert ForkServer.shared(modules()) is first
