"""Encoder features: encoder outputs that a model takes in place of embeddings of tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class EncoderFeatures:
    """Encoder features of one step.

    Attributes:
        rows: `[num_placeholders]`, the tokens of the flat batch that an encoder fills.
        values: `[num_placeholders, hidden_size]`.
        deepstack: `[num_layers, num_placeholders, hidden_size]`, added to the hidden states after
            each of the first layers (Qwen3-VL); None: nothing is.
    """

    rows: torch.Tensor
    values: torch.Tensor
    deepstack: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: torch.Tensor, outputs: torch.Tensor, hidden_size: int) -> "EncoderFeatures":
        """Returns the features of encoder outputs, `[num_placeholders, (1 + num_layers) *
        hidden_size]`, whose rows have the embedding first."""
        values, *deepstack = outputs.split(hidden_size, dim=1)
        return cls(rows, values, torch.stack(deepstack) if deepstack else None)

    def place(self, embeddings: torch.Tensor) -> None:
        """Writes the features over the embeddings of a flat batch, `[num_tokens, hidden_size]`."""
        embeddings.index_copy_(0, self.rows, self.values)

    def mask(self, num_tokens: int) -> torch.Tensor:
        """Returns which tokens of the flat batch an encoder fills, `[num_tokens]`."""
        mask = torch.zeros(num_tokens, dtype=torch.bool, device=self.rows.device)
        return mask.index_fill_(0, self.rows, True)

    def add(self, layer: int, hidden: torch.Tensor) -> bool:
        """Adds the features that follow a layer to its hidden states, `[num_tokens, hidden_size]`.
        Returns False if there are none."""
        if self.deepstack is None or layer >= len(self.deepstack):
            return False
        hidden.index_add_(0, self.rows, self.deepstack[layer])
        return True
