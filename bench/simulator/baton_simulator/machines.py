"""Machines by name, and from files that `python -m bench steps --json` has written."""

from collections.abc import Callable
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton_simulator.fit import machine_from
from baton_simulator.latency import Machine, Network, Roofline


def h200_8b() -> Machine:
    """One H200 with an 8B model (`Roofline`): 90% of 141e9 bytes for weights and KV, and a network
    of 50e9 bytes/s (400 Gbit/s) for handoffs; 2 ms for a request's way and 1 ms for a handoff's
    are taken to be so."""
    steps = Roofline()
    kv_bytes = 0.9 * 141e9 - 2.0 * steps.num_parameters
    network = Network(2e-3, 1e-3, steps.kv_bytes_per_token / 50e9)
    return Machine(steps, network, int(kv_bytes / steps.kv_bytes_per_token), 256, 2048)


PRESETS: dict[str, Callable[[], Machine]] = {"h200-8b": h200_8b}


def machine_of(name: str) -> Machine:
    """The preset of that name, or the machine that the file of that name was measured on.

    Raises `InvalidArgumentError` for a name that is neither, or a file that says something else.
    """
    if name in PRESETS:
        return PRESETS[name]()
    path = Path(name)
    if not path.is_file():
        raise InvalidArgumentError(
            "--latency-model", f"is {name!r}; must be {' or '.join(PRESETS)}, or a file"
        )
    return machine_from(path)
