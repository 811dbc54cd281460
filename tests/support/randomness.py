"""Seeds of random tests, chosen by the environment variable BATON_TEST_SEED.

Unset, every test draws what it drew before. Set to a number, every test draws something else, and
the same number repeats it. Imports nothing but the standard library: tests on a GPU machine use it.
"""

import hashlib
import os
import random
from collections.abc import Mapping
from typing import Any

VARIABLE = "BATON_TEST_SEED"


def seed_in(environment: Mapping[str, str]) -> int | None:
    """Returns the number that `environment` chooses, or None if tests shall not vary."""
    value = environment.get(VARIABLE, "")
    return int(value) if value else None


CHOSEN_SEED = seed_in(os.environ)
SESSION_SEED = CHOSEN_SEED or 0


def seed_of(node_id: str, session_seed: int = SESSION_SEED) -> int:
    """Returns the seed, of 32 bits, of the test (or other user of chance) named `node_id`."""
    digest = hashlib.sha256(f"{session_seed} {node_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def rng_of(node_id: str, session_seed: int = SESSION_SEED) -> random.Random:
    """Returns a source of random numbers of its own for `node_id`."""
    return random.Random(seed_of(node_id, session_seed))


def hypothesis_settings(chosen_seed: int | None) -> dict[str, Any]:
    """Returns the settings of property tests: never timed, and kept in no database."""
    return {
        "deadline": None,
        "database": None,
        "print_blob": True,
        "derandomize": chosen_seed is None,
    }


def header(chosen_seed: int | None) -> str:
    """Returns the line that tells how to repeat or to vary a run."""
    if chosen_seed is None:
        return f"random tests: derandomised; {VARIABLE}=123 chooses other examples"
    return f"random tests: seed {chosen_seed}; {VARIABLE}={chosen_seed} make nightly repeats them"


def repeat_hint(node_id: str, chosen_seed: int | None) -> str:
    """Returns what a failed test shows of its seed."""
    variable = "" if chosen_seed is None else f"{VARIABLE}={chosen_seed} "
    return f"seed {seed_of(node_id, chosen_seed or 0)}; repeat: {variable}pytest '{node_id}'"
