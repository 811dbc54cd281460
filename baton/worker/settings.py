"""Settings of a worker in either role: flags = environment = YAML."""

from typing import Literal

from pydantic import Field

from baton.engine.config import EngineConfig
from baton.models import DEFAULT_MODEL, locate
from baton.serving.listening import is_loopback
from baton.serving.settings import ServingSettings


class WorkerSettings(ServingSettings):
    """Settings of a worker in either role."""

    worker_id: str | None = Field(
        None,
        description="Name in the cluster. Unset: role and endpoint, such as prefill-host:port.",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Checkpoint: a folder, a hub id, or 'tiny', which ships with Baton.",
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and cache. auto: float32 on a CPU, the model's own on a GPU.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="Of K and V in the cache; equal on all workers. auto: as --dtype. fp8_e4m3: "
        "one byte a number, scaled by the checkpoint's k_scale and v_scale; holds twice the tokens "
        "of bfloat16, and loses precision. A GPU needs compute capability 9.0 (Hopper).",
    )
    block_size: int = Field(16, ge=1, description="Tokens in a KV block; equal on all workers.")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks in the pool of each cache group. Unset: as many as "
        "--kv-cache-bytes hold.",
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Size of the KV pools together, in bytes. Unset: 512 MiB on a CPU; on a GPU "
        "what --gpu-memory-utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory that weights, the largest step and the KV pools "
        "may take together.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of one sequence at most. Unset: the model's own length."
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at once.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens of one step; longer prompts are computed in chunks. Unset: 128 on a "
        "CPU, 2048 on a GPU.",
    )
    prefix_caching: bool = Field(True, description="Reuse the KV of equal prompt beginnings.")
    policy: Literal[
        "fcfs", "priority", "prefill-first", "decode-first", "deadline", "shortest-prefill"
    ] = Field(
        "decode-first",
        description="Who is served first. fcfs: strictly in order of arrival. priority: the "
        "smallest priority of a request, ageing. prefill-first: new prompts; first tokens come "
        "soonest, later ones wait. decode-first: what already generates, so that no prompt holds "
        "it up. deadline: whose first token is due first. shortest-prefill: as decode-first, then "
        "short prompts before long ones, ageing.",
    )
    max_cache_reads: int | None = Field(
        None,
        ge=1,
        description="Tokens attended to in one step, summed over its sequences: keeps steps short "
        "when many long sequences run. Unset: no limit.",
    )
    long_prefill_threshold: int | None = Field(
        None,
        ge=1,
        description="Tokens of one prompt in one step, so that a long prompt leaves room for "
        "others in each step. Unset: as many as the step takes.",
    )
    free_block_margin: int = Field(
        0,
        ge=0,
        description="KV blocks that stay free, for what runs to grow into, when a new request is "
        "let in. Larger: fewer preemptions, fewer requests at once.",
    )
    full_sequence_must_fit: bool = Field(
        False,
        description="Start a prompt only if all of it fits into the KV blocks that are free now. "
        "A prefill for another worker always waits for that.",
    )
    preemption: Literal["auto", "recompute", "swap", "return"] = Field(
        "auto",
        description="KV of a preempted sequence. recompute: it is computed again. swap: it is kept "
        "in host memory, up to --swap-bytes. return: it is dropped, and the router places the rest "
        "of the request again, if a prefill worker handed it over. auto: the mode that is expected "
        "to take least time.",
    )
    swap_bytes: int = Field(
        0, ge=0, description="Host memory for the KV of preempted sequences, in bytes; 0 is none."
    )
    max_drafts: int = Field(
        0,
        ge=0,
        description="Tokens guessed from the text so far, and verified, in one step of a "
        "sequence. Changes no result; faster where outputs repeat their prompt. 0: no guessing.",
    )
    speculate: bool = Field(
        True, description="Guess, under --max-drafts, for requests that do not say whether to."
    )
    shared_pools: bool = Field(
        True,
        description="Keep KV pools on a CPU in memory that workers of the same user on this host "
        "may read, so that blocks are handed over at the speed of memory.",
    )
    kv_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which blocks are handed over, apart from everything else; 0 takes any "
        "free one. Unset: --port.",
    )
    kv_max_message_bytes: int = Field(
        64 * 2**20,
        ge=4096,
        le=2**31 - 1,
        description="Largest message with blocks, on --kv-port: at least one block.",
    )
    kv_connector: Literal["auto", "grpc", "shm", "nixl", "cuda-ipc"] = Field(
        "auto",
        description="How blocks are fetched from another worker. grpc: over the network. shm: from "
        "the other's memory, on the same host. cuda-ipc: the same for GPUs. nixl: by RDMA, NVLink "
        "or whatever else NIXL finds (pip install 'baton-serve[nixl]'), which TLS does not cover. "
        "auto: the fastest that both have; where TLS is spoken, nixl on loopback alone.",
    )
    socket_dir: str | None = Field(
        None,
        description="Folder on this host in which workers that have no network namespace in "
        "common, such as pods, find each other's --shared-pools; the same for all of them. Unset: "
        "they have one, and need no folder.",
    )
    nixl_devices: str | None = Field(
        None,
        description="Network devices that nixl may use, as UCX names them, such as mlx5_0:1,eth0. "
        "Unset: lo where --host is a loopback address, else all.",
    )
    lease_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that blocks are kept for the worker that is to fetch them.",
    )
    kernels: Literal["auto", "triton", "torch"] = Field(
        "auto",
        description="What computes attention and the like. auto: Triton's kernels on a GPU, where "
        "the model's heads have one, and torch on a CPU.",
    )
    deterministic: bool = Field(
        False,
        description="The same request gives bitwise the same logits in any batch, chunked in any "
        "way, on any worker with this setting. Slower; needs a GPU.",
    )
    cuda_graphs: bool = Field(True, description="Replay decode steps from recorded CUDA graphs.")
    async_scheduling: bool | None = Field(
        None,
        description="Launch a step before the tokens of the one before it are here. Unset: on a "
        "GPU, which would wait meanwhile.",
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of one forward. Unset: as torch decides."
    )

    def engine_config(self) -> EngineConfig:
        given = {name: getattr(self, name) for name in EngineConfig.__slots__}
        if self.max_num_batched_tokens is not None:
            given["max_num_seqs"] = min(self.max_num_seqs, self.max_num_batched_tokens)
        return EngineConfig(**given)

    @property
    def devices_of_nixl(self) -> str | None:
        """Network devices that NIXL may use; None for all."""
        return self.nixl_devices or ("lo" if is_loopback(self.host) else None)

    @property
    def nixl_problem(self) -> str:
        """Reason why workers may not read each other's pools by NIXL here; empty if they may."""
        if self.tls is None or self.kv_connector == "nixl" or self.devices_of_nixl == "lo":
            return ""
        return (
            "TLS is spoken, and does not cover it; --kv-connector nixl on both has it all the same"
        )

    @property
    def model_path(self) -> str:
        return locate(self.model)
