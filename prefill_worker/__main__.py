"""`python -m prefill_worker`: one prefill worker."""

from pydantic import Field

from baton.serving.process import main
from baton.v1 import admin_pb2_grpc, prefill_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker
from kvtransfer.lease_table import DEFAULT_TIME_LIMIT, LeaseTable
from kvtransfer.service import KvTransferService, add_to_server
from prefill_worker.service import PrefillService
from prefill_worker.serving import PoolServer


class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker."""

    lease_timeout_s: float = Field(
        DEFAULT_TIME_LIMIT,
        gt=0,
        description="Seconds that computed blocks are kept for their decode worker.",
    )


def assemble(settings: PrefillSettings) -> Worker:
    """A prefill worker that is yet to run."""
    worker = Worker("prefill", settings)
    leases = LeaseTable(settings.lease_timeout_s)
    worker.num_leases = lambda: len(leases)
    pools = PoolServer(worker)
    worker.on_load(pools.open)
    prefill = PrefillService(worker, leases)
    worker.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
    worker.kv_server.add(add_to_server, KvTransferService(leases, pools.served))
    worker.server.add(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    return worker


async def serve(settings: PrefillSettings) -> None:
    """Serves until a signal."""
    await assemble(settings).run()


if __name__ == "__main__":
    main(PrefillSettings, "prefill", serve)
