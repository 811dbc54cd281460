"""C library of the CPU kernels: built once per host and compiler, or refused with the reason."""

import ctypes

import pytest

from baton_kernels.cpu import library


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return library.build(library.KERNELS, tmp_path_factory.mktemp("kernels") / "new")


@pytest.mark.system
def test_library_is_built_once(built):
    path, built_at = built, built.stat().st_mtime_ns
    assert library.build(library.KERNELS, path.parent) == path
    assert path.stat().st_mtime_ns == built_at
    assert [p.name for p in path.parent.iterdir()] == [path.name], "scratch files were left"


@pytest.mark.system
def test_library_uses_threads_of_torch(built):
    """With an OpenMP of its own, two sets of threads would compete for the same cores."""
    assert b"libgomp" not in built.read_bytes()
    assert ctypes.CDLL(str(built)).baton_attend_float32


def test_library_names_the_missing_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(library.NoLibraryError, match=r"no-such-compiler.*install gcc"):
        library.build(library.KERNELS, tmp_path)


def test_library_repeats_what_the_compiler_says(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho unknown target >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(library.NoLibraryError, match="unknown target"):
        library.build(library.KERNELS, tmp_path / "kept")


def test_library_says_that_its_folder_is_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(library.NoLibraryError, match=r"cannot be built|no C compiler"):
        library.build(library.KERNELS, tmp_path / "file" / "below")
