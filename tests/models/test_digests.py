"""Digests of a checkpoint's files."""

import hashlib
import os
from pathlib import Path

import pytest

from baton.models.digests import digest_of, digesting

LARGE = 64 * 2**20  # bytes from which a digest is kept


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of digests that are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "digests"


def large(file: Path, last: bytes) -> Path:
    """A sparse file that ends with these bytes."""
    with file.open("wb") as opened:
        opened.seek(LARGE - len(last))
        opened.write(last)
    return file


def combined(*files: Path) -> bytes:
    with digesting(files) as running:
        return running.combined()


def test_digest_is_that_of_every_byte(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"weights")
    assert digest_of(file) == hashlib.sha256(b"weights").digest()


def test_digests_of_files_change_with_bytes_and_not_with_names(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    for file, content in ((a, b"1"), (b, b"2"), (c, b"2")):
        file.write_bytes(content)
    assert combined(a, b) == combined(c, a)
    assert combined(a, b) != combined(b, c)
    assert len(combined()) == len(combined(a))


def test_digest_of_large_file_is_kept_until_it_changes(tmp_path, kept):
    file = large(tmp_path / "a", b"1")
    first = digest_of(file)
    (entry,) = kept.iterdir()
    assert bytes.fromhex(entry.read_text()) == first
    entry.write_text("00" * 32)
    assert digest_of(file) == bytes(32), "it was read again"
    before = file.stat()
    large(file, b"2")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` over it
    assert digest_of(file) not in (first, bytes(32))


def test_digest_is_computed_where_nothing_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = large(tmp_path / "a", b"1")
    assert digest_of(file) == hashlib.sha256(file.read_bytes()).digest()


def test_digest_of_damaged_entry_is_computed_again(tmp_path, kept):
    file = large(tmp_path / "a", b"1")
    first = digest_of(file)
    (entry,) = kept.iterdir()
    entry.write_text("not hex")
    assert digest_of(file) == first


def test_digest_of_the_hubs_file_is_its_name(tmp_path):
    """The hub's cache has links to files that are named by their SHA-256."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / ("ab" * 32)).write_bytes(b"not read")
    link = snapshot / "model.safetensors"
    link.symlink_to(blobs / ("ab" * 32))
    assert digest_of(link) == bytes.fromhex("ab" * 32)


def test_digests_of_missing_file_raise_when_read(tmp_path):
    with digesting([tmp_path / "a"]) as running, pytest.raises(FileNotFoundError):
        running.combined()
