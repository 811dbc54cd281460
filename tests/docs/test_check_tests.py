"""The check of tests, on made-up ones."""

import pytest

from docs.check_tests import findings

ALLOWED = {"allowed.py": (1, "for the sake of it")}


@pytest.mark.parametrize(
    ("path", "source", "finding"),
    [
        ("a.py", "monkeypatch.setattr(time, 'monotonic', clock)", "a.py:1: 1 attributes are repl"),
        ("a.py", "install(monkeypatch.setattr)", "a.py:1: 1 attributes are replaced"),
        ("a.py", "with patch.object(pool, 'read'): pass", "a.py:1: 1 attributes are replaced"),
        ("a.py", "with mock.patch('time.sleep'): pass", "a.py:1: 1 attributes are replaced"),
        ("allowed.py", "m.setattr(a, 'b', c)\nm.setattr(a, 'd', c)", "allowed.py:2: 2 attributes"),
        ("allowed.py", "pass", "allowed.py: nothing is replaced; remove it"),
        ("a.py", "engine._runner\nengine._ahead", "private attributes 2 times; expected at most 1"),
    ],
)
def test_check_tests_finds_patches_and_private_reads(path, source, finding):
    (found,) = findings({path: source}, ALLOWED, max_private=1)
    assert finding in found


@pytest.mark.parametrize(
    "source",
    [
        "with patch.dict(os.environ, A='b'): pass",
        "monkeypatch.setenv('A', 'b')",
        "monkeypatch.setitem(sys.modules, 'nixl', None)",
        "self._blocks + super().__init__() + one._replace(a=1)",
    ],
)
def test_check_tests_accepts_environment_and_own_attributes(source):
    assert not [*findings({"a.py": source}, ALLOWED, max_private=0)]
