"""Tokens in a file that changes while it is used."""

from functools import partial
from pathlib import Path

import pytest

from baton.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError
from baton.rpc.watched_files import INTERVAL_SECONDS, WatchedFiles
from baton.serving.tenant import Tenants
from baton.serving.tokens import new_token, owner_of, read_tokens
from tests.support.serving.credentials import Call, bearing


class Watch:
    """A file of tokens, and the time at which it is looked at."""

    def __init__(self, path: Path, *lines: str) -> None:
        self.path = path
        self.now = 0.0
        self.write(*lines)
        self.file = WatchedFiles([path], partial(read_tokens, path), clock=lambda: self.now)
        self.tenants = Tenants(self.file.current, needs_token=True)

    def write(self, *lines: str) -> None:
        """In the place of the one before, as Kubernetes and careful editors do it."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.path)

    def later(self) -> None:
        self.now += INTERVAL_SECONDS


def test_new_token_is_valid_by_its_line(tmp_path):
    token, line = new_token("acme")
    assert token not in line
    assert len({new_token("acme")[0] for _ in range(100)}) == 100
    path = tmp_path / "tokens"
    path.write_text(f"{line} # the first\n")
    assert owner_of(token, read_tokens(path)) == "acme"


@pytest.mark.parametrize("name", ["", "two words", "a#b", "x" * 65, "a\n"])
def test_new_token_refuses_invalid_tenant_name(name):
    with pytest.raises(InvalidArgumentError, match="tenant: is"):
        new_token(name)


def test_tenants_refuse_token_removed_from_file(tmp_path):
    (kept, its_line), (revoked, other_line) = new_token("acme"), new_token("globex")
    watch = Watch(tmp_path / "tokens", its_line, other_line)
    assert watch.tenants.of(bearing(revoked)).name == "globex"
    watch.write(its_line)
    watch.later()
    with pytest.raises(UnauthenticatedError, match="not known here"):
        watch.tenants.of(bearing(revoked))
    assert watch.tenants.of(bearing(kept)).name == "acme"


def test_tenants_refuse_every_call_when_last_token_is_removed(tmp_path):
    token, line = new_token("acme")
    watch = Watch(tmp_path / "tokens", line)
    watch.write("# no tenant")
    watch.later()
    for call in (bearing(token), bearing("any"), Call()):
        with pytest.raises(UnauthenticatedError):
            watch.tenants.of(call)


def test_tenants_accept_token_added_to_file(tmp_path):
    watch = Watch(tmp_path / "tokens")
    token, line = new_token("acme")
    watch.write(line)
    watch.later()
    assert watch.tenants.of(bearing(token)).name == "acme"


@pytest.mark.parametrize("harm", ["no line of this kind", None])
def test_tenants_keep_tokens_when_file_breaks_and_warn_once(tmp_path, caplog, harm):
    token, line = new_token("acme")
    watch = Watch(tmp_path / "tokens", line)
    if harm is None:
        watch.path.unlink()
    else:
        watch.write(harm)
    for _ in range(5):
        watch.later()
        assert watch.tenants.of(bearing(token)).name == "acme"
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    watch.write()
    watch.later()
    with pytest.raises(UnauthenticatedError):
        watch.tenants.of(bearing(token))


def test_tenants_refuse_unreadable_file_at_start(tmp_path):
    with pytest.raises(FailedPreconditionError):
        Tenants.read(tmp_path / "nowhere")


def test_tenants_refuse_anonymous_call_unless_allowed(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{new_token('acme')[1]}\n")
    calls = (Call(), Call(("authorization", "Basic b25l")))
    for call in calls:
        with pytest.raises(UnauthenticatedError, match="a token is needed"):
            Tenants.read(path, needs_token=True).of(call)
        assert Tenants.read(path).of(call).name == "default"
