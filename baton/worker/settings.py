"""What a worker can be told, whatever its role: flags = environment = YAML."""

from typing import Literal

from pydantic import Field

from baton.engine.config import EngineConfig
from baton.models import DEFAULT_MODEL, locate
from baton.serving.settings import ServingSettings


class WorkerSettings(ServingSettings):
    """Settings of both roles."""

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
    block_size: int = Field(16, ge=1, description="Tokens in a KV block; equal on all workers.")
    num_blocks: int | None = Field(
        None, ge=1, description="KV blocks in the pool. Unset: as many as --kv-cache-bytes hold."
    )
    kv_cache_bytes: int = Field(512 * 2**20, ge=1, description="Size of the KV pool in bytes.")
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
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of one forward. Unset: as torch decides."
    )

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens or self.max_num_seqs),
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.prefix_caching,
            num_threads=self.num_threads,
        )

    @property
    def model_path(self) -> str:
        return locate(self.model)
