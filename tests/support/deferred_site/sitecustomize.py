"""Deferred device in every process whose PYTHONPATH names this folder and the repository's."""

import os
import sys
import traceback

try:
    from tests.support.engine import deferred_stream

    deferred_stream.install()
except BaseException:
    # Python would print the error and go on, and the tests would pass without the device.
    traceback.print_exc()
    print("deferred device: cannot be installed; end of this process", file=sys.stderr, flush=True)
    os._exit(os.EX_SOFTWARE)
