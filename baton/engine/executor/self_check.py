"""Numeric self-check at load: a sequence has the same logits however it is batched and cached.

The probe shows that every layer attends through the paged cache. A model may still depend on what
is not in that cache: the state of a recurrence or a convolution, or positions counted over the flat
batch. It would answer wrongly, and differently with each neighbour in the batch. So three small
steps over a cache of their own compare one sequence with itself, prefilled and decoded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.device_stream import uploader
from baton.engine.executor.memory.cache_plan import CachePlan
from baton.engine.executor.models.transformers_model import refusing
from baton.engine.executor.runner import DecoderModel
from baton.errors import UnsupportedModelError

# Most tokens of the sequence after its first full block, which a prefix hit leaves to compute.
_TOKENS_AFTER_HIT = 4

# Most that logits may differ, relative to their spread: rounding depends on the shape of a batch.
_BOUNDS = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.08}

# First tokens of a range that are compared on their own in half precision: what state of another
# sequence disturbs may fade after them.
_NUM_FIRST = 4

_ALONE, _OTHER, _BEHIND, _CHUNKED, _HIT, _PENDING, _DECODED = range(7)
# Blocks of each sequence. The prefix hit and the decode share the first one of the sequence alone;
# the pending prefix that of the sequence behind the other, which is computed in the same step.
_TABLES = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [1, 9], [5, 10], [1, 11]], np.int32)


@dataclass(frozen=True, slots=True)
class _Range:
    """Range of tokens that a step computes: positions `start` to `end` of the sequence `slot`.

    Attributes:
        how: for errors, how it is computed; empty: its logits are not compared.
    """

    slot: int
    start: int
    end: int
    how: str = ""

    @property
    def length(self) -> int:
        return self.end - self.start


class NotFiniteError(UnsupportedModelError):
    """Logits that are no finite numbers, of one sequence alone."""


class SelfCheck:
    """Numeric self-check of one model.

    Attributes:
        bound: most that logits may differ, relative to their spread.

    Args:
        attention: makes the attention over a cache; the model keeps the last one it was given.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: Callable[[KvCache], Attention],
        plan: CachePlan,
        vocab_size: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = plan.cache(plan.pools([int(_TABLES.max())] * len(plan.layouts), device), [])
        self._attention = attention(self._cache)
        self._block_size = plan.layouts[0].block_size
        num_after_hit = min(_TOKENS_AFTER_HIT, self._block_size)  # in the second block
        self._length = min(self._block_size + num_after_hit, max_len)
        self._vocab_size = vocab_size
        self.bound = _BOUNDS[dtype]
        self._is_exact = dtype is torch.float32
        self._upload = uploader(device)

    def run(self, name: str) -> None:
        """Runs the check. Raises `UnsupportedModelError`, which says what differed and by how much,
        for the model called `name`, and `NotFiniteError`."""
        for how, difference in self.differences(name):
            if not difference <= self.bound:
                raise UnsupportedModelError(
                    f"{name} computes other logits {how} than alone: they differ by "
                    f"{difference:.2g} of their spread, allowed is {self.bound:g}. It has state "
                    "outside of its KV cache, or positions of its own; not implemented"
                )

    @torch.inference_mode()
    def differences(self, name: str) -> Iterator[tuple[str, float]]:
        """Yields each way to compute the sequence, and how much its logits then differ."""
        self._model.use(self._attention)
        length, size = self._length, self._block_size
        (alone,) = self._step(name, [_Range(_ALONE, 0, length, "alone")])
        if not alone.isfinite().all():
            raise NotFiniteError(
                f"{name} computes logits that are no finite numbers: its dtype may be too small "
                "for them; choose another --dtype"
            )
        for pool in self._cache.pools:
            pool.copy_blocks([1, 2], [7, 8], pool)
        prefilled = [
            _Range(_BEHIND, 0, length, "behind another sequence in one batch"),
            _Range(_CHUNKED, length // 2, length, "in two chunks"),
            _Range(_HIT, size, length, "after a prefix hit"),
            _Range(_PENDING, size, length, "after a prefix of the same step"),
        ]
        prefilled = [r for r in prefilled if r.length > 0]
        found = self._step(name, [_Range(_OTHER, 0, length), *prefilled])
        for compared, logits in zip(prefilled, found, strict=True):
            yield compared.how, self._difference(alone[compared.start :], logits)
        # Decodes of one step, each of which sees the K and V that those before it write.
        first = min(size, length - 1)
        decoded = [_Range(_DECODED, i, i + 1, "by decodes") for i in range(first, length)]
        found = self._step(name, [_Range(_OTHER, length - 1, length), *decoded])
        yield "by decodes", self._difference(alone[first:], torch.cat(found))

    def _step(self, name: str, ranges: Sequence[_Range]) -> list[torch.Tensor]:
        """Computes the ranges as one flat batch; returns `[num_tokens, vocab_size]` for each that
        is compared."""
        counts = np.array([r.length for r in ranges])
        slots, starts = np.array([r.slot for r in ranges]), np.array([r.start for r in ranges])
        num_decodes = len(ranges) if counts.max() == 1 else 0
        tables = [_TABLES] * len(self._cache.pools)
        batch = self._attention.prepare(RaggedBatch(slots, starts, counts, num_decodes, tables))
        is_other = batch.token_slots == _OTHER  # all others are the same sequence
        token_ids = (batch.positions * 7919 + 13 + 101 * is_other) % self._vocab_size
        rows = np.flatnonzero(np.repeat([bool(r.how) for r in ranges], counts))
        with refusing(name):
            logits = self._model.forward(
                self._upload(token_ids), self._upload(batch.positions), batch, self._upload(rows)
            )
        if len(logits) != len(rows):
            raise UnsupportedModelError(
                f"{name} computes logits of all tokens only (it ignores logits_to_keep); not "
                "implemented"
            )
        compared = [n for r, n in zip(ranges, counts.tolist(), strict=True) if r.how]
        return list(logits.float().split(compared))

    def _difference(self, expected: torch.Tensor, got: torch.Tensor) -> float:
        """Returns the difference relative to the spread of the expected logits: the largest of all
        tokens; in half precision, where a near tie of experts may be rounded either way, the
        median of all or of the first tokens, whichever is larger."""
        spread = expected.std(-1).clamp_min(1e-6)
        of_tokens = (got - expected).square().mean(-1).sqrt() / spread
        if self._is_exact:
            return float(of_tokens.max())
        return float(torch.maximum(of_tokens.median(), of_tokens[:_NUM_FIRST].median()))
