"""Record of a worker in the registry, as the fields of a hash in Redis.

`baton.cluster.registry.registration` writes and renews it, `baton.cluster.registry.watcher` is the
reading side. A record does not prove that the worker answers; gRPC health does. Independent of the
workers' tasks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from baton.cluster.prefix import PrefixNamespace
from baton.rpc.worker_role import ROLES, Role

_ROLES: dict[str, Role] = {role: role for role in ROLES}

_OPTIONAL = {
    b"max_num_batched_tokens",
    b"metrics_endpoint",
    b"admin_endpoint",
    b"version",
    b"pooled_output",
    b"keeps_role",
    b"content",
    b"max_num_seqs",
    b"rival",
}

MAX_ID_BYTES = 256
_MAX_TEXT_BYTES = 1024
_MAX_NUMBER = 2**63


def new_epoch() -> int:
    """Returns the epoch of a worker that starts now: wall-clock milliseconds.

    It increases from start to start on machines with synchronized clocks, and needs neither Redis
    nor a disk. If a clock was set back, the watcher accepts the worker after its grace period.
    """
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Registry record of one worker.

    Attributes:
        id: its name, the same across restarts.
        role: the pool it belongs to in this epoch.
        endpoint: "host:port" of its gRPC service.
        kv_endpoint: "host:port" from which its blocks are fetched.
        epoch: increases each time it starts (`new_epoch`) or changes its role.
        model: served model name.
        fingerprint: hash of weights and configuration, execution backend and version; the model of
            the prefix namespace.
        layout: the serialized layouts of all cache groups (`baton.v1.KvLayouts`), opaque here.
        tokenizer_hash: identifies the tokenizer.
        kv_dtype: element type of the cache, such as "float32".
        block_size: tokens per block.
        max_model_len: maximum tokens of a sequence, prompt and output together.
        num_blocks: blocks of the cache group that sees furthest back.
        draining: it finishes its requests and accepts no new ones.
        max_num_batched_tokens: maximum tokens of one step; 0: not reported, as by older workers.
        metrics_endpoint: "host:port" of its metrics; empty: none, or not reported.
        admin_endpoint: "host:port" of its admin service; empty: not reported; it is at `endpoint`.
        version: Baton version; empty: not reported, as by older workers.
        pooled_output: "embedding" or "score" for a model that has such an output in place of text;
            empty: it generates.
        keeps_role: it cannot change its role.
        content: hash of weights, their configuration and dtype: workers of the same content serve
            the same model. Empty: not reported, as by older workers.
        max_num_seqs: maximum sequences that run at once; 0: not reported, as by older workers.
        rival: "host:port" of another live worker with this id, which gets no work; empty: none.
    """

    id: str
    role: Role
    endpoint: str
    kv_endpoint: str
    epoch: int
    model: str
    fingerprint: bytes
    layout: bytes
    tokenizer_hash: bytes
    kv_dtype: str
    block_size: int
    max_model_len: int
    num_blocks: int
    draining: bool = False
    max_num_batched_tokens: int = 0
    metrics_endpoint: str = ""
    admin_endpoint: str = ""
    version: str = ""
    pooled_output: str = ""
    keeps_role: bool = False
    content: bytes = b""
    max_num_seqs: int = 0
    rival: str = ""

    @property
    def pairing(self) -> bytes:
        """Pairing: workers exchange blocks only if their pairings are equal. Opaque."""
        return b"\0".join((self.version.encode(), self.fingerprint, self.layout))

    @property
    def namespace(self) -> PrefixNamespace:
        """Namespace of its chain hashes."""
        return PrefixNamespace(
            self.fingerprint, self.tokenizer_hash, self.kv_dtype, self.block_size
        )

    def to_fields(self) -> dict[str, str | bytes | int]:
        """Returns the record as the fields of a Redis hash."""
        return {
            "id": self.id,
            "role": self.role,
            "endpoint": self.endpoint,
            "kv_endpoint": self.kv_endpoint,
            "epoch": self.epoch,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "tokenizer_hash": self.tokenizer_hash,
            "kv_dtype": self.kv_dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "num_blocks": self.num_blocks,
            "draining": int(self.draining),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "metrics_endpoint": self.metrics_endpoint,
            "admin_endpoint": self.admin_endpoint,
            "version": self.version,
            "pooled_output": self.pooled_output,
            "keeps_role": int(self.keeps_role),
            "content": self.content,
            "max_num_seqs": self.max_num_seqs,
            "rival": self.rival,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "WorkerRecord":
        """Returns the record that `to_fields` wrote. Ignores unknown fields.

        Raises:
            ValueError: a field is missing or malformed.
        """
        missing = {name.encode() for name in cls.__slots__} - fields.keys() - _OPTIONAL
        if missing:
            raise ValueError(f"fields are missing: {sorted(missing)}")
        return cls(
            id=_text(fields[b"id"]),
            role=_role(_text(fields[b"role"])),
            endpoint=_text(fields[b"endpoint"]),
            kv_endpoint=_text(fields[b"kv_endpoint"]),
            epoch=_number(fields[b"epoch"]),
            model=_text(fields[b"model"]),
            fingerprint=fields[b"fingerprint"],
            layout=fields[b"layout"],
            tokenizer_hash=fields[b"tokenizer_hash"],
            kv_dtype=_text(fields[b"kv_dtype"]),
            block_size=_number(fields[b"block_size"], least=1),
            max_model_len=_number(fields[b"max_model_len"], least=1),
            num_blocks=_number(fields[b"num_blocks"], least=1),
            draining=_number(fields[b"draining"]) != 0,
            max_num_batched_tokens=_number(fields.get(b"max_num_batched_tokens", b"0")),
            metrics_endpoint=_text(fields.get(b"metrics_endpoint", b"")),
            admin_endpoint=_text(fields.get(b"admin_endpoint", b"")),
            version=_text(fields.get(b"version", b"")),
            pooled_output=_text(fields.get(b"pooled_output", b"")),
            keeps_role=_number(fields.get(b"keeps_role", b"0")) != 0,
            content=fields.get(b"content", b""),
            max_num_seqs=_number(fields.get(b"max_num_seqs", b"0")),
            rival=_text(fields.get(b"rival", b"")),
        )


def _text(value: bytes) -> str:
    if len(value) > _MAX_TEXT_BYTES:
        raise ValueError(f"a field has {len(value)} bytes; expected at most {_MAX_TEXT_BYTES}")
    return value.decode()


def _number(value: bytes, least: int = 0) -> int:
    number = int(value)
    if not least <= number < _MAX_NUMBER:
        raise ValueError(f"a number is {number}; expected {least} or more, below 2**63")
    return number


def _role(name: str) -> Role:
    if name not in _ROLES:
        raise ValueError(f"no role is called {name!r}")
    return _ROLES[name]
