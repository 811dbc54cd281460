"""Temporary folders of processes, which are killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cluster.process_folder import PREFIX, ProcessFolder, remove_abandoned

HOLDER = """
import sys
from pathlib import Path
from baton.cluster.process_folder import ProcessFolder
folder = ProcessFolder("test-", Path(sys.argv[1]))
(folder.path / "some.log").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(within: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder, and the folder."""
    command = [sys.executable, "-c", HOLDER, str(within)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_folder_of_killed_process_is_removed(tmp_path):
    with holder(tmp_path) as (process, folder):
        process.kill()
        process.wait()
        assert (folder / "some.log").exists()
        remove_abandoned(tmp_path)
        assert not folder.exists()


def test_folder_of_suspended_process_stays(tmp_path):
    with holder(tmp_path) as (process, folder):
        process.send_signal(signal.SIGSTOP)
        remove_abandoned(tmp_path)
        assert (folder / "some.log").exists()


def test_folder_of_ended_process_is_removed_by_itself(tmp_path):
    with holder(tmp_path) as (process, folder):
        process.communicate("", timeout=10)
        assert not folder.exists()


def test_own_folder_stays_until_it_is_removed(tmp_path):
    folder = ProcessFolder(within=tmp_path)
    remove_abandoned(tmp_path)
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.remove()
    assert not folder.path.exists()


def test_folders_without_a_lock_stay(tmp_path):
    logs, other = tmp_path / f"{PREFIX}logs", tmp_path / "other"
    for folder in (logs, other):
        folder.mkdir()
    (other / ".lock").touch()
    (tmp_path / f"{PREFIX}file").touch()
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {logs.name, "other", f"{PREFIX}file"}


def test_links_are_never_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    folder = tmp_path / f"{PREFIX}folder"
    folder.mkdir()
    (folder / ".lock").symlink_to(outside / ".lock")
    remove_abandoned(tmp_path)
    assert (outside / ".lock").exists()
    assert folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_folder_of_another_user_stays(tmp_path):
    folder = tmp_path / f"{PREFIX}other"
    folder.mkdir()
    (folder / ".lock").touch()
    os.chown(folder, 12345, 12345)
    remove_abandoned(tmp_path)
    assert folder.exists()
    os.chown(folder, 0, 0)
    remove_abandoned(tmp_path)
    assert not folder.exists()
