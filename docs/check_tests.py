"""Check of tests: fakes at seams, and no patches: `python docs/check_tests.py`.

What a test varies is an argument of the product, and what it observes is public. The files of
`PATCHES` replace attributes nevertheless, for the reason there; and tests read private attributes
of other objects `MAX_PRIVATE` times at most. Both shrink: lower them with what you remove.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""Names of named tuples that are public."""
KERNELS = "what the kernels' modules read once, as they are imported or compiled"
PATCHES: Mapping[str, tuple[int, str]] = {
    "tests/bench/test_gpu_verdict.py": (2, "the machine: its cores and packages"),
    "tests/e2e/test_hub_id.py": (2, "constants of huggingface_hub, read as it is imported"),
    "tests/engine/executor/test_attention_tiles.py": (2, KERNELS),
    "tests/engine/executor/test_device_stream.py": (3, KERNELS),
    "tests/engine/executor/test_graphs.py": (5, "CUDA, which is not there"),
    "tests/engine/executor/test_recorded_speculation.py": (
        1,
        "plans that no recorded step computes",
    ),
    "tests/engine/executor/test_static_batch.py": (2, KERNELS),
    "tests/gpu/test_attention_libraries.py": (1, "replays of a recorded step"),
    "tests/gpu/test_triton_engine.py": (1, "a capture that fails on a GPU"),
    "tests/kernels/interpreted/test_gpu_benchmark.py": (1, "steps of a benchmark of a GPU"),
    "tests/kernels/interpreted/test_tile_descriptors.py": (1, "loads of Triton's interpreter"),
    "tests/kernels/test_compilations.py": (1, "a hook of Triton"),
    "tests/kernels/test_compile.py": (2, "the capability of a GPU that is not there"),
    "tests/kernels/test_decode_inputs.py": (1, "a library that cannot be built"),
    "tests/kernels/test_gpu.py": (1, "properties of a GPU that is not there"),
    "tests/kvtransfer/connectors/nixl/test_nixl.py": (
        2,
        "two events in an order that no peer can cause at will",
    ),
    "tests/router/lifecycle/test_inference.py": (1, "the thread that makes an answer"),
    "tests/support/engine/by_handle.py": (1, "CUDA IPC of a CPU, in every engine of a process"),
    "tests/support/kernels/interpreter.py": (1, "products of Triton's interpreter"),
    "tests/support/spans.py": (1, "the tracer, of which a process has one"),
    "tests/test_randomness.py": (1, "the seed of Hypothesis"),
}
MAX_PRIVATE = 155


def patches(tree: ast.AST) -> Iterator[int]:
    """Yields the lines in which attributes are replaced for the time of a test."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr="setattr")
                | ast.Attribute(ast.Name("patch"), "object")
                | ast.Call(ast.Name("patch") | ast.Attribute(ast.Name("mock"), "patch"))
            ):
                yield node.lineno


def private_reads(tree: ast.AST) -> Iterator[int]:
    """Yields the lines in which private attributes of other objects are used."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if not is_own and not node.attr.startswith("__") and node.attr not in NAMED_TUPLE:
            yield node.lineno


def findings(
    sources: Mapping[str, str], allowed: Mapping[str, tuple[int, str]], max_private: int
) -> Iterator[str]:
    """One sentence for each violation in files, by their paths."""
    private: Counter[str] = Counter()
    for path, source in sources.items():
        tree = ast.parse(source)
        lines, most = [*patches(tree)], allowed.get(path, (0, ""))[0]
        if len(lines) > most:
            yield (
                f"{path}:{lines[-1]}: {len(lines)} attributes are replaced; expected at most "
                f"{most}. Pass what varies as an argument."
            )
        if path in allowed and not lines:
            yield f"{path}: nothing is replaced; remove it from docs/check_tests.py"
        private[path] = len([*private_reads(tree)])
    if (total := private.total()) > max_private:
        worst = ", ".join(f"{path} ({count})" for path, count in private.most_common(5))
        yield (
            f"tests use private attributes {total} times; expected at most {max_private}. "
            f"Most are in {worst}."
        )


def main() -> int:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    found = [*findings(sources, PATCHES, MAX_PRIVATE)]
    most = sum(count for count, _ in PATCHES.values())
    print("\n".join(found) or f"Tests: at most {most} attributes are replaced.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
