"""Every Python process whose PYTHONPATH names this folder, as in a pod of the router's image: without
the packages of workers, in a cgroup whose files are in the folder that POD_CGROUP names."""

import os
import sys

sys.modules.update(dict.fromkeys(("llguidance", "safetensors", "setproctitle", "torch")))

from baton.engine.executor.memory import machine_memory  # noqa: E402 - after what it shall not find

machine_memory._LIMITS = (os.path.join(os.environ["POD_CGROUP"], "memory.max"),)
