"""Router that writes its state to the file PROBE_FILE on SIGUSR1.

Run as `python -m tests.support.cluster.probed_router`. The file has what the index holds of
each worker and what it counts on each. Nothing of the router is changed.
"""

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

from baton.cluster.index import LocalityIndex
from baton.serving.process import main
from baton_router.process import serve
from baton_router.routing.fleet.fleet import Fleet
from baton_router.settings import RouterSettings


def contents(index: LocalityIndex) -> dict[str, list[str]]:
    """The blocks of each worker, in order."""
    found: dict[str, list[str]] = {worker: [] for worker in index._slots}
    for block, holders in index._entries.items():
        for slot in index._slots_of(holders & index._live):
            found[slot.worker].append(block.hex())
    return {worker: sorted(blocks) for worker, blocks in found.items()}


def fleet_view(fleet: Fleet) -> dict[str, Any]:
    return {
        "epochs": {m.record.id: m.record.epoch for m in fleet.members},
        "counters": {
            m.record.id: [m.load.num_sequences, m.load.num_queued_tokens, m.load.num_held_tokens]
            for m in fleet.members
        },
        "blocks": contents(fleet.index),
    }


def tell(*_: object) -> None:
    gc.unfreeze()  # what was loaded is not listed otherwise
    (fleet,) = (found for found in gc.get_objects() if isinstance(found, Fleet))
    path = Path(os.environ["PROBE_FILE"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(fleet_view(fleet)))
    partial.rename(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    main(RouterSettings, "router", serve)
