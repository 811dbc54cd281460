"""Oracle: greedy generation and log-probabilities by transformers itself, float32, one prompt at a
time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

# The most that log-probabilities may differ, relative to the spread of the logits.
_BOUND = 1e-4


def _plain(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model


class Oracle:
    """Remembers what it was asked, since many tests ask the same.

    `load`: reads the model in a folder.
    """

    def __init__(self, load: Callable[[str], PreTrainedModel] = _plain) -> None:
        self._load = load
        self._models: dict[str, PreTrainedModel] = {}
        self._eos: dict[str, Any] = {}
        self._known: dict[tuple[str, tuple[int, ...], int, bool], tuple[int, ...]] = {}
        self._scores: dict[
            tuple[str, tuple[int, ...], tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]
        ] = {}

    def __call__(
        self, path: str, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True
    ) -> tuple[int, ...]:
        """The tokens that follow the prompt.

        Asserts that no choice was so close that another order of additions could turn it.
        """
        key = (path, tuple(prompt), max_tokens, ignore_eos)
        if key not in self._known:
            self._known[key] = self._generate(path, key[1], max_tokens, ignore_eos)
        return self._known[key]

    def _generate(
        self, path: str, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool
    ) -> tuple[int, ...]:
        self.model(path)
        out = self.generate(
            path, prompt, max_tokens, None if ignore_eos else self._eos[path], output_logits=True
        )
        return decided(out.logits, out.sequences[0, len(prompt) :])

    def generate(
        self,
        path: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        eos_token_id: Any,
        logits_processor: Any = None,
        **config: Any,
    ) -> Any:
        """Returns all that `generate` of transformers does, without sampling."""
        return self.model(path).generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            logits_processor=logits_processor,
            generation_config=GenerationConfig(
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=eos_token_id,
                pad_token_id=0,
                return_dict_in_generate=True,
                **config,
            ),
        )

    def check_logprobs(
        self,
        path: str,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
    ) -> None:
        """Asserts that log-probabilities of tokens that follow a prompt are its own."""
        assert len(logprobs) == len(token_ids)
        if not token_ids:
            return
        key = (path, tuple(prompt), tuple(token_ids))
        if key not in self._scores:
            self._scores[key] = self._score(*key)
        expected, spread = self._scores[key]
        apart = ((torch.tensor(logprobs) - expected).abs() / spread).max().item()
        assert apart < _BOUND, f"log-probabilities differ by {apart:.2g} of the logits' spread"

    def _score(
        self, path: str, prompt: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of tokens, and the spread of the logits of each."""
        ids = torch.tensor([[*prompt, *token_ids]])
        positions = torch.arange(ids.shape[1])[None]
        with torch.inference_mode():
            model = self.model(path)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        return rows.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0], rows.std(-1)

    def model(self, path: str) -> PreTrainedModel:
        if path not in self._models:
            model = self._load(path).eval()
            # generate() takes the model's own where it is given None.
            self._eos[path] = model.generation_config.eos_token_id
            model.generation_config.eos_token_id = None
            self._models[path] = model
        return self._models[path]


def decided(rows: Sequence[torch.Tensor], token_ids: torch.Tensor) -> tuple[int, ...]:
    """Returns the tokens. Asserts that none was chosen from a row by less than 1e-4."""
    for row in rows:
        first, second = row[0].topk(2).values.tolist()
        assert first - second > 1e-4, "the oracle's choice is a toss-up; take another prompt"
    return tuple(token_ids.tolist())
