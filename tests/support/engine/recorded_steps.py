"""Recorded decode steps on a CPU, replayed by computing them again, with any attention."""

from collections.abc import Hashable, Sequence

import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch, StepBatch
from baton.engine.executor.models.cuda_graphs import DecodeGraphs, Step, capture_sizes
from baton.engine.llm import LLM

CPU = torch.device("cpu")


class Rerun:
    """Records a step by noting it down; the output stays where it was at first."""

    def record(self, step: Step) -> Step:
        out = step()
        return lambda: out.copy_(step())


class PreparedBatch:
    """Static batch of any attention: what it prepares of a step, which has no padding."""

    forms = ("any",)

    def __init__(self, attention: Attention, max_rows: int) -> None:
        self.positions = torch.zeros(max_rows, dtype=torch.int64)
        self.step: StepBatch | None = None
        self._attention = attention

    def fill(self, ragged: RaggedBatch, num_rows: int) -> str:
        self.step = self._attention.prepare(ragged)
        num_tokens = len(self.step.positions)
        self.positions[:num_tokens] = torch.from_numpy(self.step.positions)
        self.positions[num_tokens:num_rows] = 0
        return self.forms[0]

    def rows(self, _num_rows: int, _form: Hashable) -> "PreparedBatch":
        return self


class CountedGraphs(DecodeGraphs):
    """Recorded steps of an engine on a CPU. The logits of padding are not numbers.

    `num_steps`, `num_with_drafts`: steps that ran, and those that verified drafts.
    """

    num_steps = 0
    num_with_drafts = 0

    def __init__(self, engine: LLM) -> None:
        config, runner = engine.core.config, engine.core.runner
        sizes = capture_sizes(config.max_num_seqs, 1 + config.max_drafts)
        batch = PreparedBatch(runner.attention, sizes[-1])

        def forward(
            token_ids: torch.Tensor,
            positions: torch.Tensor,
            batch: PreparedBatch,
            rows: torch.Tensor,
        ) -> torch.Tensor:
            logits = torch.full((len(rows), engine.core.facts.info.vocab_size), torch.nan)
            if batch.step is not None:
                num = len(batch.step.positions)
                inputs = token_ids[:num], positions[:num], batch.step, rows[:num]
                logits[:num] = runner.model.forward(*inputs)
            return logits

        has_mrope = runner.model.has_mrope
        super().__init__(forward, batch, sizes, CPU, Rerun(), has_mrope=has_mrope)
        runner.graphs = self

    def run(
        self,
        token_ids: Sequence[torch.Tensor],
        ragged: RaggedBatch,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        self.num_steps += 1
        self.num_with_drafts += bool((ragged.num_queries > 1).any())
        return super().run(token_ids, ragged, offsets)
