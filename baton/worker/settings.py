"""Settings of a worker in any role: those of its engine, and its own."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from baton.engine.config import EngineConfig
from baton.engine.plugins import DRAFTER_GROUP, DRAFTERS, POLICY_GROUP
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.errors import InvalidArgumentError
from baton.models import DEFAULT_MODEL, named
from baton.plugins import check_plugin
from baton.serving.grpc.channels import MAX_ENCODER_INPUT_BYTES
from baton.serving.listening import is_loopback
from baton.serving.settings import ServingSettings
from baton.settings.groups import Group, grouped

KV_CONNECTORS = ("auto", "grpc", "shm", "nixl", "cuda-ipc")
KV_CONNECTOR_GROUP = "baton.kv_connectors"
_PLUGINS: dict[str, tuple[Iterable[str], str]] = {
    "policy": (POLICIES, POLICY_GROUP),
    "drafter": (DRAFTERS, DRAFTER_GROUP),
    "kv_connector": (KV_CONNECTORS, KV_CONNECTOR_GROUP),
}

# Fields made at run time have no static types; those of `engine_config` do.
if TYPE_CHECKING:
    _EngineSettings = ServingSettings
else:
    # A worker differs from a bare engine.
    _ENGINE = Group(EngineConfig, defaults={"shared_pools": True})
    _EngineSettings = grouped(ServingSettings, engine=_ENGINE)


class WorkerSettings(_EngineSettings):
    """Settings of a worker in any role."""

    worker_id: str | None = Field(
        None,
        description="Name in the cluster. Unset: role and endpoint, such as prefill-host:port.",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Checkpoint: a folder, a GGUF file, a hub id (or ID@REVISION, or "
        "ID/FILE.gguf), or 'tiny' or 'shapes', which ship with Baton. Or NAME=CHECKPOINT, to serve "
        "it under a name of your own; it is the last part of the checkpoint's path otherwise. "
        "Routers find the workers of a model by its name.",
    )
    engine_process: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="Step the engine in a process of its own, so that neither clients nor Python's "
        "interpreter lock delay a step. auto: under Linux, unless the server cannot open the "
        "process's memory on a GPU, or nixl or a connector of another package moves blocks of a "
        "GPU. yes: refuse to start where it cannot. no: in a thread of the worker.",
    )
    engine_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds without a sign of life of an engine that has work, after which its "
        "requests move to other workers and the worker ends: its GPU or driver hangs, or its "
        "process was stopped. On a CPU a step may take longer, while it uses CPU time.",
    )
    kv_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for transfers of KV and encoder outputs alone; 0 takes any free one. "
        "Unset: --port.",
    )
    kv_max_message_bytes: int = Field(
        64 * 2**20,
        ge=4096,
        le=2**31 - 1,
        description="Maximum bytes of a message of KV blocks, on --kv-port; at least one block.",
    )
    max_encoder_input_bytes: int = Field(
        MAX_ENCODER_INPUT_BYTES,
        ge=0,
        le=2**30,
        description="Maximum bytes of the preprocessed images of a request, which a message may "
        "have beside --max-message-bytes. Give routers and workers one value.",
    )
    kv_connector: str = Field(
        "auto",
        description="KV connector: transport of blocks from another worker. grpc: over the "
        "network. shm: shared memory, on the same host. cuda-ipc: the same for GPUs. nixl: RDMA, "
        "NVLink or another transport that NIXL finds (the extra nixl), which TLS "
        "does not cover. auto: the fastest of these that both workers have; with TLS, nixl on "
        "loopback alone. Or one that an installed package adds (baton.kv_connectors), given to "
        "both workers.",
    )
    socket_dir: str | None = Field(
        None,
        description="Folder on this host through which workers without a common network "
        "namespace, such as pods, find each other's --shared-pools; the same for all of them. "
        "Unset: they share a network namespace.",
    )
    nixl_devices: str | None = Field(
        None,
        description="Network devices of nixl, as UCX names them, such as mlx5_0:1,eth0. Unset: lo "
        "if --host is a loopback address, else all.",
    )
    require_rdma: bool = Field(
        False,
        description="Refuse to start if nixl would read from other hosts by TCP; needs "
        "--kv-connector nixl.",
    )
    lease_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Timeout of a lease in seconds: blocks wait that long for their claimant.",
    )

    @field_validator(*_PLUGINS)
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        """Raises `ValueError` for a plug-in that is not installed."""
        field = str(info.field_name)
        try:
            check_plugin(field, name, *_PLUGINS[field])
        except InvalidArgumentError as error:
            raise ValueError(error.problem) from None
        return name

    @model_validator(mode="after")
    def _can_be_rdma(self) -> Self:
        if self.require_rdma and self.kv_connector != "nixl":
            raise ValueError(
                f"--kv-connector is {self.kv_connector!r} with --require-rdma; expected nixl, the "
                "only one that uses RDMA. Give --kv-connector nixl"
            )
        return self

    def engine_config(self) -> EngineConfig:
        """Returns the engine's configuration, with a token in each step for every sequence."""
        given = self.GROUPS["engine"].values(self)
        for limit in (given["max_num_batched_tokens"], given["max_num_tokens_with_decodes"]):
            if limit is not None:
                given["max_num_seqs"] = min(given["max_num_seqs"], limit)
        return EngineConfig(**given)

    @property
    def devices_of_nixl(self) -> str | None:
        """Network devices that NIXL may use; None for all."""
        return self.nixl_devices or ("lo" if is_loopback(self.host) else None)

    @property
    def may_use_nixl(self) -> bool:
        """Whether blocks may move by NIXL, if it is installed."""
        return self.kv_connector == "nixl" or (
            self.kv_connector == "auto" and not self.nixl_problem
        )

    @property
    def probes_nixl(self) -> bool:
        """Whether this worker may read from other hosts by NIXL, over what is to be found out."""
        is_local = self.kv_connector == "auto" and self.devices_of_nixl == "lo"
        return self.may_use_nixl and not is_local

    @property
    def nixl_problem(self) -> str:
        """Reason why workers may not read each other's pools by NIXL here; empty if they may."""
        if self.tls is None or self.kv_connector == "nixl" or self.devices_of_nixl == "lo":
            return ""
        return "TLS does not cover it; give --kv-connector nixl to both workers to use it anyway"

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return named(self.model)[0]

    @property
    def model_path(self) -> str:
        return named(self.model)[1]
