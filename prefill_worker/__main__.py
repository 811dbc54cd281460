"""`python -m prefill_worker`: one prefill worker."""

from pydantic import Field

from baton.serving.process import main
from baton.v1 import admin_pb2_grpc, kv_transfer_pb2_grpc, prefill_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker
from kvtransfer.lease import LeaseTable
from kvtransfer.service import KvTransferService, ServedPool
from prefill_worker.service import PrefillService


class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker."""

    lease_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that computed blocks are kept for their decode worker."
    )


async def serve(settings: PrefillSettings) -> None:
    """Serves until a signal."""
    worker = Worker("prefill", settings)
    leases = LeaseTable()
    worker.num_leases = lambda: len(leases)

    def served() -> ServedPool:
        return ServedPool(worker.engine.engine.pool, worker.pairing(), worker.epoch)

    prefill = PrefillService(worker, leases, settings.lease_timeout_s)
    worker.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    worker.server.add(
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server, KvTransferService(leases, served)
    )
    worker.server.add(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    await worker.run()


if __name__ == "__main__":
    main(PrefillSettings, "prefill", serve)
