"""`python -m prefill_worker`: one prefill worker."""

from baton.serving.process import main
from baton.v1 import admin_pb2_grpc, prefill_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.exchange import KvExchange
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker
from prefill_worker.service import PrefillService


class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker."""


def assemble(settings: PrefillSettings) -> Worker:
    """A prefill worker that is yet to run."""
    worker = Worker("prefill", settings)
    prefill = PrefillService(worker, KvExchange(worker))
    worker.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    worker.server.add(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    return worker


async def serve(settings: PrefillSettings) -> None:
    """Serves until a signal."""
    await assemble(settings).run()


if __name__ == "__main__":
    main(PrefillSettings, "prefill", serve)
