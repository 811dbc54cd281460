"""Build info of a process: its versions, its clock, and its view of Redis."""

import functools
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from baton.v1 import admin_pb2 as pb
from baton.version import version

# Libraries whose versions affect behaviour; those not installed are skipped.
LIBRARIES = (
    "grpcio",
    "protobuf",
    "redis",
    "transformers",
    "tokenizers",
    "torch",
    "triton",
    "llguidance",
    "nixl",
)


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Baton, Python and the installed `LIBRARIES`, by name."""
    found = {"baton": version(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            continue
    return found


def unix_ms(time: float | None) -> int:
    """Returns a time in seconds since 1970 as the messages have it, in milliseconds; 0 for None."""
    return 0 if time is None else int(1000 * time)


def info(
    *,
    has_redis: bool,
    redis_answers: bool,
    worker: pb.WorkerFacts | None,
    refused_records: Mapping[str, str] | None = None,
) -> pb.GetInfoResponse:
    """Returns the answer to `Admin.GetInfo`.

    Args:
        has_redis: the process is configured with a Redis.
        redis_answers: Redis answers.
        worker: None on a router, and while a worker loads its model.
        refused_records: reasons why a router refuses records in Redis, by worker id.
    """
    state = pb.REDIS_STATE_NONE
    if has_redis:
        state = pb.REDIS_STATE_ANSWERING if redis_answers else pb.REDIS_STATE_SILENT
    return pb.GetInfoResponse(
        versions=versions(),
        unix_time_ms=unix_ms(time.time()),
        redis=state,
        worker=worker,
        refused_records=refused_records,
    )
