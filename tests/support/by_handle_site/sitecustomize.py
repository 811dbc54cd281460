"""Pools that are opened by handle, as on a GPU, in every process whose PYTHONPATH names this folder
and the repository's; and the deferred device in runs of tests on it.
"""

import os
import sys
import traceback

try:
    from tests.support.changed_import import ChangedImport
    from tests.support.engine import deferred_stream

    def _change(_module: object) -> None:
        from tests.support.engine import host_ipc

        host_ipc.install()

    ChangedImport("baton.engine.core.process.pool_memory", _change).install()
    if os.environ.get(deferred_stream.VARIABLE):
        deferred_stream.install()
except BaseException:
    # Python would print the error and go on, and the tests would pass without the handles.
    traceback.print_exc()
    print("pools by handle: cannot be installed; end of this process", file=sys.stderr, flush=True)
    os._exit(os.EX_SOFTWARE)
