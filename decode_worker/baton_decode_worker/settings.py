"""Settings of the decode role."""

from pydantic import Field

from baton.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Settings of a decode worker, beside those of every worker."""

    admit_factor: float = Field(
        4.0,
        gt=0,
        description="Blocks promised to admitted requests at most, as a multiple of the pool; "
        "what does not fit yet waits. Of a worker that decodes.",
    )
