"""Settings of the decode role."""

from pydantic import Field

from baton.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Settings of a decode worker, beside those of every worker."""

    admit_factor: float = Field(
        4.0,
        gt=0,
        description="Maximum blocks promised to admitted requests, as a multiple of the pool; "
        "sequences beyond the pool wait. For the decode role.",
    )
