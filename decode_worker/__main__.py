"""`python -m decode_worker`: one decode worker."""

from pydantic import Field

from baton.serving.process import main
from baton.v1 import admin_pb2_grpc, decode_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.exchange import KvExchange
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker
from decode_worker.service import DecodeService


class DecodeSettings(WorkerSettings):
    """Settings of a decode worker."""

    admit_factor: float = Field(
        4.0,
        gt=0,
        description="Blocks promised to admitted requests at most, as a multiple of the pool; "
        "what does not fit yet waits.",
    )


def assemble(settings: DecodeSettings) -> Worker:
    """A decode worker that is yet to run."""
    worker = Worker("decode", settings)
    service = DecodeService(worker, KvExchange(worker), settings.admit_factor)
    worker.num_promised_blocks = lambda: service.num_promised_blocks
    worker.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, service)
    worker.server.add(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    return worker


async def serve(settings: DecodeSettings) -> None:
    """Serves until a signal."""
    await assemble(settings).run()


if __name__ == "__main__":
    main(DecodeSettings, "decode", serve)
