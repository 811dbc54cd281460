"""Backend for any decoder of transformers, with paged attention in its attention interface.

At load a probe forward must reach every layer once; it yields the K and V shapes, each layer's
scale and extras, and, through Baton's mask function, each layer's mask rule. A model with a feature
that the probe cannot describe is refused by name, never guessed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from baton.engine.executor.attention.interface import Attention, LayerAttention, StepBatch
from baton.engine.executor.attention.mask_rule import MaskRule, recognise
from baton.engine.executor.cache.kv_layout import KvShape
from baton.engine.executor.device import is_out_of_memory
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.models.hf import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from baton.engine.executor.models.mrope import has_mrope
from baton.errors import UnsupportedModelError

_PROBE_TOKENS = 4
# Arguments that models of transformers pass to attention functions and that have no effect here.
_HARMLESS = {
    "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "sliding_window",
    "position_embeddings", "output_attentions", "output_hidden_states", "return_dict",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep",
    "past_key_values", "output_router_logits", "token_type_ids", "num_items_in_batch",
}  # fmt: skip
_names = count()


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """Properties of one layer, found by the probe. `num_heads`: number of query heads."""

    shape: KvShape
    num_heads: int
    attention: LayerAttention


class AttentionHook:
    """Entry of one model in transformers' attention interface.

    The interface maps a name to a function. Each model has a name of its own, and its function is
    bound to this object, which holds the running batch, or None during the probe.
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
        """Computes attention. `query`, `key`, `value`: `[1, heads, num_tokens, head_dim]`."""
        index: int | None = module.layer_idx  # type: ignore[assignment]
        if index is None or index < 0:
            raise UnsupportedModelError(
                "an attention layer has no index: several layers share it; not implemented"
            )
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
        """Records the layer's properties; returns zeros, since a probe's values do not matter."""
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
    """Mask that carries its rule from the mask function to the attention function."""

    ndim = 4

    def __init__(self, rule: MaskRule) -> None:
        self.rule = rule


class TransformersModel:
    """Model of transformers behind the runner's interface."""

    execution = "transformers"

    def __init__(self, model: PreTrainedModel, hook: AttentionHook) -> None:
        self._model = model
        # A head may scale or bound even what a removed projection lets through.
        self._backbone = model.base_model if is_headless(model) else None
        self.has_mrope = has_mrope(model.base_model)
        self._hook = hook
        # transformers passes a 4-dimensional mask on unchanged.
        self._ready_mask = torch.empty(1, 1, 1, 1, device=model.device)

    def use(self, paged: Attention | None) -> None:
        """Implements `DecoderModel.use`."""
        self._hook.paged = paged

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor:
        """Returns the logits `[len(logit_rows), vocab_size]` of these rows of a flat batch.

        Args:
            token_ids: `[num_tokens]`.
            positions: `[num_tokens]`, each within its own sequence; in a model with M-RoPE also
                `[3, num_tokens]`.
            features: encoder outputs in place of the embeddings of placeholders.
        """
        self._hook.batch = batch
        inputs: dict[str, Any] = {
            "position_ids": positions.unsqueeze(-2),
            "attention_mask": self._ready_mask,
            "use_cache": False,
        }
        if features is None:
            inputs["input_ids"] = token_ids[None]
        else:
            embeddings = self._model.get_input_embeddings()(token_ids)
            features.place(embeddings)
            inputs["inputs_embeds"] = embeddings[None]
            if features.deepstack is not None:
                inputs["deepstack_visual_embeds"] = list(features.deepstack)
                inputs["visual_pos_masks"] = features.mask(len(embeddings))[None]
        try:
            if self._backbone is not None:
                return self._backbone(**inputs).last_hidden_state[0, logit_rows]  # type: ignore[no-any-return]
            out = self._model(**inputs, logits_to_keep=logit_rows)
        finally:
            self._hook.batch = None
        return out.logits[0]  # type: ignore[no-any-return]


def without_head(model: PreTrainedModel) -> PreTrainedModel:
    """Removes a model's head: its logits are the hidden states from now on."""
    model.set_output_embeddings(torch.nn.Identity())
    return model


def is_headless(model: PreTrainedModel) -> bool:
    """Returns whether `without_head` has removed the model's head."""
    return isinstance(model.get_output_embeddings(), torch.nn.Identity)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns an error of a model's code into the refusal of the model called `name`; errors of the
    device pass."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        is_of_mask = _OpaqueMask.__name__ in str(error)
        reason = "it computes with the attention mask" if is_of_mask else str(error)
        raise UnsupportedModelError(
            f"{name} cannot run with attention over a paged cache ({reason}); "
            "it attends in code of its own; not implemented"
        ) from error


def probe(model: PreTrainedModel, hook: AttentionHook) -> list[ProbedLayer]:
    """Runs a few tokens through the model and returns the properties of its layers, in order.

    Raises `UnsupportedModelError` if the probe misses a layer: it would silently have no cache.
    """
    name, ids = type(model).__name__, torch.arange(_PROBE_TOKENS, device=model.device)[None]
    # Without a mask, transformers looks for packed sequences in the positions; on the meta device
    # they have no values.
    mask = {"attention_mask": torch.ones_like(ids)} if model.device.type == "meta" else {}
    with refusing(name), torch.inference_mode(), _NoWeights():
        model(input_ids=ids, position_ids=ids, use_cache=False, **mask)
    expected = set(range(num_layers(model.config)))
    if missing := sorted(expected - hook.probed.keys()):
        raise UnsupportedModelError(
            f"{name}: layers {missing} do not use transformers' attention "
            "interface (they are recurrent, or attend in code of their own); not implemented"
        )
    return [hook.probed[i] for i in sorted(expected)]


class _NoWeights(TorchFunctionMode):
    """Makes zeros of what linear layers and embeddings give: a probe's values do not matter, and to
    read all weights takes a large model's time."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        match function, args:
            case (F.linear, (x, weight, *_)):
                return x.new_zeros(*x.shape[:-1], len(weight))
            case (F.embedding, (ids, weight, *_)):
                width = weight.shape[1]
                return torch.zeros(*ids.shape, width, dtype=weight.dtype, device=ids.device)
        return function(*args, **kwargs or {})


def check_state(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` for a model that says of its class that it keeps state, and
    that convolves over tokens, as recurrences do beside attention. In half precision, rounding may
    hide from the numeric check what small weights make of that state."""
    is_stateful = getattr(model, "_is_stateful", False)
    if is_stateful and any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} has state outside of its KV cache, beside attention; not "
            "implemented"
        )


def num_layers(config: PretrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)
