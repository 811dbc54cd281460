"""Record of a worker, as it stands in Redis."""

from baton.cluster.registry.registry import WorkerRecord

TOKENIZER = b"t" * 16
RECORD = WorkerRecord(
    id="w",
    role="decode",
    endpoint="127.0.0.1:1",  # no server listens there
    kv_endpoint="127.0.0.1:1",
    epoch=1,
    model="tiny",
    fingerprint=b"f",
    layout=b"",
    tokenizer_hash=TOKENIZER,
    kv_dtype="float32",
    block_size=16,
    max_model_len=2048,
    num_blocks=1000,
)
