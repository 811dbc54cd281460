"""`python -m tests.fuzz.atheris_run TARGET CORPUS -runs=N ...`: one target under atheris.

A process of its own, since libFuzzer ends it. Exit code 0: nothing was found. What follows the
target goes to libFuzzer.
"""

import sys
import tracemalloc

import atheris
import torch  # noqa: F401 - imported first, so that it is not instrumented

# Of an input and what is made of it; an allocation sized by a length that the input claims is
# larger by far.
MOST_BYTES_PER_BYTE = 400
MOST_BYTES_BESIDE = 2**20

with atheris.instrument_imports(include=["baton", "baton_kvtransfer", "baton_router"]):
    from tests.support.fuzz_targets import TARGETS, check


def main() -> None:
    name = sys.argv[1]
    target = TARGETS[name]
    for seed in target.seeds:  # what is made once is made now
        target.read(seed)

    def one_input(data: bytes) -> None:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        check(target, data)
        _, peak = tracemalloc.get_traced_memory()
        taken = peak - before
        assert taken < MOST_BYTES_BESIDE + MOST_BYTES_PER_BYTE * len(data), f"{taken} bytes"

    tracemalloc.start()
    atheris.Setup([name, *sys.argv[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
