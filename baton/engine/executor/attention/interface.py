"""Paged attention interface: one ragged batch per step in, attention outputs out.

There is no padding: the queries of all sequences, prefill chunks and decodes alike, lie in one flat
`[num_tokens]`. Knows neither the implementations (`torch_attention`, `triton_attention`), nor
models beyond a layer's number, scale and mask rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton_kernels.attention.plan import Ranges


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Ragged batch of a step: the tokens of its sequences, one after the other.

    Attributes:
        batch_slots: `[num_ranges]`, the row of each sequence in the block tables.
        starts: `[num_ranges]`, the position of its first token in this step.
        num_queries: `[num_ranges]`, its number of tokens in this step.
        num_decodes: the leading sequences that have one token each.
        block_tables: per cache group, `[num_batch_slots, blocks]`, all of one shape; they cover all
            tokens of the step.
        table_versions: `[num_batch_slots]`, the number of changes of each row of `block_tables`;
            None: any row may have changed.
        table_rewrites: per cache group, `[num_batch_slots]`, as `table_versions`, without changes
            that only append blocks.
        last_keys: `[num_tokens]`, the position of the last token that each token sees, which is one
            of the step; None: its own. A window ends with the token itself all the same.
    """

    batch_slots: Int64Array
    starts: Int64Array
    num_queries: Int64Array
    num_decodes: int
    block_tables: Sequence[TokenArray]
    table_versions: Int64Array | None = None
    table_rewrites: Sequence[Int64Array] | None = None
    last_keys: Int64Array | None = None

    @classmethod
    def of_decodes(
        cls,
        batch_slots: Int64Array,
        starts: Int64Array,
        block_tables: Sequence[TokenArray],
        table_versions: Int64Array | None = None,
        table_rewrites: Sequence[Int64Array] | None = None,
    ) -> "RaggedBatch":
        """Returns a batch of one token per slot."""
        num_queries = np.ones(len(batch_slots), np.int64)
        return cls(
            batch_slots,
            starts,
            num_queries,
            len(batch_slots),
            block_tables,
            table_versions,
            table_rewrites,
        )

    def places(self) -> tuple[Int64Array, Int64Array]:
        """Returns slot and position of each token of the flat batch, `[num_tokens]` each."""
        if len(self.batch_slots) == self.num_decodes:
            return self.batch_slots, self.starts
        return self.ranges.places()

    @property
    def ranges(self) -> Ranges:
        """The batch as kernels plan it."""
        return Ranges.of_batch(self.batch_slots, self.starts, self.num_queries)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of one layer, other than its tensors.

    Attributes:
        scale: factor of the scores.
        rule: mask rule: the tokens that a query sees.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: `[num_heads]` logits that take part in the softmax and carry no value.
    """

    scale: float
    rule: MaskRule
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class StepBatch(Protocol):
    """Attention batch of one step, shared by all layers of a cache group.

    Attributes:
        token_slots, positions: of each token of the flat batch, `[num_tokens]`.
    """

    @property
    def token_slots(self) -> Int64Array: ...

    @property
    def positions(self) -> Int64Array: ...


class Attention(Protocol):
    """Paged attention on one kind of device: writes a step's K and V to the cache and attends.

    In each layer, the K and V of all tokens of the step are in the cache before any query is
    attended: a sequence may continue from blocks that another one computes in the same step.

    `reads_unwritten`: it reads the unwritten rest of a sequence's last block, which must be finite.
    """

    reads_unwritten: bool

    def prepare(self, ragged: RaggedBatch) -> StepBatch:
        """Returns the batch that `forward` takes, made once per step for all layers."""
        ...

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Any,
    ) -> torch.Tensor:
        """Computes one layer.

        Args:
            index: index of the layer in the model.
            query: `[num_tokens, num_heads, key_head_dim]`.
            key: `[num_tokens, num_kv_heads, key_head_dim]`, position embedding applied.
            value: `[num_tokens, num_kv_heads, value_head_dim]`.
            batch: the batch that `prepare` returned.

        Returns `[num_tokens, num_heads, value_head_dim]`.
        """
        ...
