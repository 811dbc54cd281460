"""Nothing of ours can run what it reads: no pickle in any guise, no code of a checkpoint."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.repository import ROOT

ROOMS = ("baton", "router", "prefill_worker", "decode_worker", "kvtransfer", "kernels", "bench",
         "helm", "protos")  # fmt: skip
# Compiles kernels in processes of its own, for `make check`; nothing of another's reaches it.
MULTIPROCESSING = {"kernels/baton_kernels/compile.py"}

MODULES = {
    "_pickle", "cloudpickle", "copyreg", "cPickle", "dill", "jsonpickle", "joblib", "marshal",
    "pickle", "pickletools", "shelve",
}  # fmt: skip
CALLS = {
    "eval", "exec", "torch.load", "torch.jit.load", "torch.package.PackageImporter",
    "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "yaml.load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
}  # fmt: skip


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def name_of(node: ast.expr) -> str:
    """As "a.b.c"; empty for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def found_in(tree: ast.AST, path: str = "some/file.py") -> Iterator[str]:
    """Yields the imports and calls that must not be there."""
    banned = MODULES if path in MULTIPROCESSING else {*MODULES, "multiprocessing"}
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in imported if name.split(".")[0] in banned or name in CALLS)
        if isinstance(node, ast.Call):
            yield from of_call(node)


def of_call(call: ast.Call) -> Iterator[str]:
    name = name_of(call.func)
    if name in CALLS:
        yield name
    trust = [k.value for k in call.keywords if k.arg == "trust_remote_code"]
    trusts = [value for value in trust if not _is(value, False)]
    owner, _, method = name.rpartition(".")
    is_auto = owner.rpartition(".")[2].startswith("Auto")
    reads = method in ("from_pretrained", "from_config") and is_auto
    if trusts or (reads and not trust):
        yield f"{name} without trust_remote_code=False"
    yield from (f"{name} with pickle" for k in call.keywords if k.arg == "allow_pickle")


def _is(node: ast.expr, constant: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is constant


def test_sources_never_deserialize_unsafely():
    found = {}
    for path in sources():
        relative = str(path.relative_to(ROOT))
        found[relative] = list(found_in(ast.parse(path.read_text(encoding="utf-8")), relative))
    assert len(found) > 200
    assert {path: names for path, names in found.items() if names} == {}


def test_unsafe_reading_check_covers_every_package():
    packaged = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/__init__.py")}
    assert packaged - {"tests"} <= set(ROOMS)
    assert all((ROOT / room).is_dir() for room in ROOMS)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import pickle as harmless",
        "from cloudpickle import loads",
        "import multiprocessing.shared_memory",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "eval(text)",
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=settings.trust)",
        "transformers.AutoTokenizer.from_pretrained(path)",
        "anything(trust_remote_code=True)",
    ],
)
def test_unsafe_reading_check_finds_unsafe_line(line):
    assert list(found_in(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["yaml.safe_load(text)", "model.eval()", "re.compile(x)", "json.load(file)",
     "AutoConfig.from_pretrained(path, trust_remote_code=False)"],
)  # fmt: skip
def test_unsafe_reading_check_passes_harmless_line(line):
    assert not list(found_in(ast.parse(line)))


def test_jinja2_with_known_sandbox_escape_is_excluded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (jinja2,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "jinja2")
    assert "3.1.6" in jinja2.specifier
    assert "3.1.5" not in jinja2.specifier
