"""Encoder features: encoder outputs that a model takes in place of embeddings of tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class EncoderFeatures:
    """Encoder features of one step.

    Attributes:
        rows: `[num_placeholders]`, the tokens of the flat batch that an encoder fills.
        values: `[num_placeholders, hidden_size]`.
    """

    rows: torch.Tensor
    values: torch.Tensor

    def place(self, embeddings: torch.Tensor) -> None:
        """Writes the features over the embeddings of a flat batch, `[num_tokens, hidden_size]`."""
        embeddings.index_copy_(0, self.rows, self.values)
