"""Makes every Python process whose PYTHONPATH names this folder one of a pod of the router's image:
without packages of workers, in a cgroup whose files are in the folder that POD_CGROUP names."""

import os
import sys
from pathlib import Path

sys.modules.update(dict.fromkeys(("llguidance", "safetensors", "setproctitle", "torch")))

from baton.engine.executor.memory import machine_memory  # noqa: E402 - after what it shall not find

machine_memory._LIMITS = (str(Path(os.environ["POD_CGROUP"], "memory.max")),)
