"""Any decoder of transformers, with our attention in its attention interface.

At load a probe forward must reach every layer, once and in order; from it come the K and V shapes,
each layer's scale and extras, and, through our mask function, each layer's mask rule. What cannot
be described is refused by name, never guessed.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from baton.engine.attention.interface import Attention, LayerAttention, StepBatch
from baton.engine.attention.mask_rule import MaskRule, recognise
from baton.engine.cache.kv_pool import KvShape
from baton.engine.models.hf import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from baton.errors import UnsupportedModelError

_PROBE_TOKENS = 4
# Arguments that attention functions of transformers pass and that change nothing here.
_HARMLESS = {
    "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window",
    "position_embeddings", "output_attentions", "output_hidden_states", "return_dict",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep",
    "past_key_values", "output_router_logits", "token_type_ids", "num_items_in_batch",
}  # fmt: skip
_names = count()


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """Properties of one layer, found by the probe. `num_heads`: of queries."""

    shape: KvShape
    num_heads: int
    attention: LayerAttention


class AttentionHook:
    """One model's entry in transformers' attention interface.

    The interface maps a name to a function; each model gets a name of its own, and the function is
    bound to this object, which knows whether it is being probed or which batch runs.
    """

    def __init__(self, max_len: int) -> None:
        self.name = f"baton_{next(_names)}"
        self.probed: dict[int, ProbedLayer] = {}
        self.paged: Attention | None = None
        self.batch: StepBatch | None = None
        self.max_len = max_len
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._describe_mask)

    def _describe_mask(self, **kwargs: Any) -> "_OpaqueMask":
        return _OpaqueMask(recognise(kwargs["mask_function"], self.max_len))

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query`, `key`, `value` are `[1, heads, num_tokens, head_dim]`."""
        index: int = module.layer_idx  # type: ignore[assignment]
        if self.batch is None:
            return self._probe(index, query, key, value, attention_mask, scaling, kwargs), None
        assert self.paged is not None
        query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
        layer = self.probed[index].attention
        out = self.paged.forward(index, layer, query, key, value, self.batch)
        return out[None], None

    def _probe(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """Notes what this layer needs; the values computed in a probe do not matter."""
        unknown = {k for k, v in extras.items() if v is not None} - _HARMLESS - {"softcap", "s_aux"}
        if unknown or index in self.probed:
            reason = f"passes {sorted(unknown)}" if unknown else "attends twice"
            raise UnsupportedModelError(f"attention layer {index} {reason}; not implemented")
        if not isinstance(mask, _OpaqueMask):
            raise UnsupportedModelError(f"attention layer {index} does not build a mask by rule")
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        attention = LayerAttention(scale, mask.rule, extras.get("softcap"), extras.get("s_aux"))
        shape = KvShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.probed[index] = ProbedLayer(shape, query.shape[1], attention)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


class _OpaqueMask:
    """Passes from our mask function to our attention function, through the model."""

    ndim = 4

    def __init__(self, rule: MaskRule) -> None:
        self.rule = rule


class TransformersModel:
    """A loaded model behind the runner's interface."""

    execution = "transformers"

    def __init__(self, model: PreTrainedModel, hook: AttentionHook) -> None:
        self._model = model
        self._hook = hook
        # A mask that is already 4-dimensional is passed on as it is.
        self._ready_mask = torch.empty(1, 1, 1, 1, device=model.device)

    def use(self, paged: Attention) -> None:
        """Gives the model its cache."""
        self._hook.paged = paged

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[len(logit_rows), vocab_size]` of the chosen rows of a flat batch.

        Args:
            token_ids: `[num_tokens]`.
            positions: `[num_tokens]`, each within its own sequence.
        """
        self._hook.batch = batch
        try:
            out = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                attention_mask=self._ready_mask,
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            self._hook.batch = None
        return out.logits[0]  # type: ignore[no-any-return]


def probe(model: PreTrainedModel, hook: AttentionHook) -> list[ProbedLayer]:
    """Runs a few tokens through the model and returns what its layers need, in order.

    Raises `UnsupportedModelError` if a layer is not reached: its cache would silently be missing.
    """
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run with attention over a paged cache ({error}); "
            "it attends in code of its own; not implemented"
        ) from error
    expected = set(range(num_layers(model.config)))
    if missing := sorted(expected - hook.probed.keys()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: layers {missing} do not use transformers' attention "
            "interface (they are recurrent, or attend in code of their own); not implemented"
        )
    return [hook.probed[i] for i in sorted(expected)]


def num_layers(config: PretrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)
