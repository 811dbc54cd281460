"""The scheduler under everything that can happen to it, with a cache whose content is checked."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.request import KvSource, Purpose, ReturnCost
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.engine.scheduler.sequences.config import Preemption
from baton.engine.scheduler.sequences.sequence import Request
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import VOCAB_SIZE, FakeGrammar, cache_group
from tests.support.scheduler.harness import ROOTS, Harness, request

MAX_PROMPT = 14
MAX_TOKENS = 10
MAX_SEQUENCES = 3
INPUT_LENGTHS = {b"A": 1, b"B": 2, b"C": 3}

LOCAL, EXTERNAL, PREFILL = "local", "external", "prefill"

configs = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 4),
        "max_num_seqs": st.sampled_from([3, 4, 5, 6, 2, 1]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "policy": st.sampled_from(sorted(POLICIES)),
        "preemption": st.sampled_from([Preemption.SWAP, *Preemption]),
        "max_cache_reads": st.sampled_from([None, None, None, None, 1, 20, 50]),
        "long_prefill_threshold": st.sampled_from([None, None, None, 1, 4]),
        "handoff_chunk_tokens": st.sampled_from([None, 1, 3]),
        "free_block_margin": st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.4]),
        "full_sequence_must_fit": st.sampled_from([False, False, False, True]),
        "max_drafts": st.sampled_from([4, 1, 0]),
    }
)
extra_tokens = st.sampled_from([40, 8, 3, 1, 0])
extra_with_decodes = st.sampled_from([None, None, 3, 0])
spare_blocks = st.sampled_from([0, 0, 0, 0, 1, 2, 5, 12])
windows = st.sampled_from([[None]] * 4 + [[None, 3], [3], [6, 2], [None, 30, 4]])
host_blocks = st.sampled_from([30, 30, 0, 5])
encoders = st.sampled_from([(0, 0), (0, 0), (3, 3), (3, 8), (6, 4)])
grammars = st.sampled_from([None, None, None, None, FakeGrammar(5)])
return_costs = st.sampled_from([None, ReturnCost(0.0, 1e-6, 1e-3), ReturnCost(1.0, 0.0, 1e-9)])
kinds = st.sampled_from([[LOCAL]] * 3 + [[PREFILL], [EXTERNAL], [LOCAL, LOCAL, EXTERNAL, PREFILL]])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, delivers and releases in any order."""

    @initialize(
        config=configs,
        extra_tokens=extra_tokens,
        extra_with_decodes=extra_with_decodes,
        spare_blocks=spare_blocks,
        windows=windows,
        host_blocks=host_blocks,
        encoder=encoders,
        kinds=kinds,
        width=st.sampled_from([0, 0, 2, 3]),
        may_speculate=st.booleans(),
        data=st.data(),
    )
    def make(
        self,
        config: dict[str, Any],
        extra_tokens: int,
        extra_with_decodes: int | None,
        spare_blocks: int,
        windows: list[int | None],
        host_blocks: int,
        encoder: tuple[int, int],
        kinds: list[str],
        width: int,
        may_speculate: bool,
        data: st.DataObject,
    ) -> None:
        chunk = config["max_num_seqs"] + extra_tokens
        with_decodes = None
        if extra_with_decodes is not None:
            with_decodes = config["max_num_seqs"] + min(extra_tokens, extra_with_decodes)
        self.may_speculate = may_speculate
        self.beam_width = width if width <= config["max_num_seqs"] else 0

        def num_blocks(window: int | None) -> int:
            """The smallest pool in which any one request can run by itself, and some more."""
            size, total = config["block_size"], MAX_PROMPT + MAX_TOKENS - 1
            peak = -(-total // size)
            if window is not None:
                peak = min(peak, -(-(window - 1 + chunk) // size) + 1)
            return peak * max(1, self.beam_width) + spare_blocks

        self.harness = Harness(
            [cache_group(num_blocks(window), window, host_blocks) for window in windows],
            max_num_batched_tokens=chunk,
            max_num_tokens_with_decodes=with_decodes,
            max_model_len=MAX_PROMPT + MAX_TOKENS,
            encoder_budget=encoder[0],
            encoder_cache_tokens=encoder[1],
            **config,
        )
        self.harness.drafts_itself = True
        self.config = self.harness.config
        self.scheduler = self.harness.scheduler
        self.kinds = kinds
        self.total_tokens = 0
        for _ in range(6):
            self.add(data)

    # What a server does.

    @property
    def num_here(self) -> int:
        return len(self.harness.live) + len(self.harness.kept)

    @precondition(lambda self: self.num_here < 9)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        taken = self.scheduler.requests.keys()
        free_ids = [i for i in "abcdefghijklmnopq" if i not in taken]
        added = self.draw_request(data, data.draw(st.sampled_from(free_ids)))
        self.total_tokens += len(added.spec.token_ids)
        self.total_tokens += added.spec.params.max_tokens * added.spec.params.num_sequences
        self.harness.add(added)

    @precondition(lambda self: self.num_here < 5)
    @rule(data=st.data())
    def add_a_crowd(self, data: st.DataObject) -> None:
        for _ in range(4):
            self.add(data)

    def draw_request(self, data: st.DataObject, request_id: str) -> Request:
        kind = data.draw(st.sampled_from(self.kinds))
        # Few different beginnings, so that prefixes are shared.
        family = data.draw(st.integers(0, 1))
        length = data.draw(st.integers(1, MAX_PROMPT) | st.sampled_from([8, 12]))
        prompt = [(family + i * i) % VOCAB_SIZE for i in range(length)]
        if data.draw(st.booleans()):
            prompt[-1] = data.draw(st.integers(0, VOCAB_SIZE - 1))
        max_tokens = data.draw(st.just(MAX_TOKENS) | st.integers(1, MAX_TOKENS))
        several = self.draw_several(data)
        if several.get("temperature") and kind != PREFILL:
            several["outputs"] = self.draw_outputs(data, several["n"], max_tokens)
        given = 0
        if not several:
            most = min(length - 1, max_tokens - 1)
            given = data.draw(st.sampled_from([0, 0, min(2, most), most]))
        inputs: tuple[EncoderInput, ...] = ()
        if self.config.encoder_budget:
            inputs = self.draw_inputs(data, prompt, length - given)
        return request(
            request_id,
            prompt,
            max_tokens,
            given=given,
            stop_token_ids=data.draw(st.sampled_from([frozenset(), frozenset(), frozenset({3})])),
            eos_token_ids=data.draw(st.sampled_from([frozenset(), frozenset(), frozenset({5})])),
            root=data.draw(st.sampled_from(ROOTS)),
            purpose=Purpose.PREFILL if kind == PREFILL else Purpose.GENERATE,
            kv_source=KvSource.EXTERNAL if kind == EXTERNAL else KvSource.LOCAL,
            priority=data.draw(st.integers(0, 2)),
            arrival_time=float(self.total_tokens),
            first_token_deadline=data.draw(st.sampled_from([None, 0.0, 99.0])),
            speculates=self.may_speculate
            and not several.get("beam_width")
            and data.draw(st.booleans()),
            prompt_logprobs=data.draw(st.sampled_from([None, None, None, 0])),
            encoder_inputs=inputs,
            return_cost=None if several or kind != EXTERNAL else data.draw(return_costs),
            grammar=None if several.get("beam_width") else data.draw(grammars),
            **several,
        )

    def draw_several(self, data: st.DataObject) -> dict[str, Any]:
        if self.beam_width and data.draw(st.booleans()):
            return {"beam_width": self.beam_width, "n": data.draw(st.integers(1, self.beam_width))}
        n = min(data.draw(st.sampled_from([1, 1, 1, 2, 3])), self.config.max_num_seqs)
        return {"n": n, "temperature": 1.0} if n > 1 else {}

    def draw_outputs(
        self, data: st.DataObject, n: int, max_tokens: int
    ) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the tokens that samples have from elsewhere; most begin here."""
        if data.draw(st.booleans()):
            return ()
        tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=max_tokens - 1).map(tuple)
        outputs = data.draw(st.tuples(*[st.none() | tokens] * n))
        return () if set(outputs) == {None} else outputs

    def draw_inputs(
        self, data: st.DataObject, prompt: list[int], end: int
    ) -> tuple[EncoderInput, ...]:
        """Spans of the prompt that an encoder fills; their tokens are all the same."""
        inputs, position = [], 0
        for content in data.draw(st.lists(st.sampled_from(sorted(INPUT_LENGTHS)), max_size=3)):
            start = position + data.draw(st.integers(0, 2))
            position = start + INPUT_LENGTHS[content]
            if position > end:
                break
            inputs.append(EncoderInput(content, start, INPUT_LENGTHS[content]))
            prompt[start:position] = [0] * (position - start)
        return tuple(inputs)

    @rule()
    def several_steps(self) -> None:
        for _ in range(8):
            if not self.scheduler.has_work:
                return
            self.note(self.harness.step())

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = self.harness.schedule()
        result = self.harness.runner.run(plan)
        if data.draw(st.integers(0, 4)) == 0:
            self.end_some(data)
        self.harness.apply(plan, result)
        self.note(plan)

    @rule(data=st.data())
    def step_without_tokens(self, data: st.DataObject) -> None:
        """Some decodes have no token yet, and are computed again."""

        def choose(decodes: list[range]) -> list[range]:
            late = data.draw(st.lists(st.sampled_from(decodes), unique=True)) if decodes else []
            if late:
                event("a token was late")
            return late

        self.note(self.harness.step_without(choose))

    @rule(data=st.data())
    def steps_ahead(self, data: st.DataObject) -> None:
        """Steps that are planned before the ones before them are applied, amid commands."""

        def between() -> None:
            for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2]))):
                if self.harness.awaiting and data.draw(st.booleans()):
                    self.hear_of_another_worker(data)
                    continue
                commands = ["add", "end", "end one", "release", "knob", "job"]
                match data.draw(st.sampled_from(commands)):
                    case "add" if self.num_here < 5:
                        self.add(data)
                    case "end":
                        self.end_some(data)
                    case "end one":
                        self.end_a_sequence(data)
                    case "release" if self.harness.kept:
                        self.release(data)
                    case "job" if self.config.encoder_budget:
                        self.command_an_encode_job(data)
                    case "knob":
                        self.turn_a_rare_knob(data)

        for _ in range(2):
            if self.scheduler.has_work:
                self.step_ahead(between, num_ahead=3)

    def step_ahead(self, between: Callable[[], None], num_ahead: int = 1) -> None:
        if self.harness.step_ahead(between, num_ahead) is not None:
            event("a step was planned ahead")

    @precondition(lambda self: self.num_here)
    @rule(data=st.data())
    def end_some(self, data: st.DataObject) -> None:
        ids = sorted((self.harness.live | self.harness.kept).keys())
        if ids:
            self.harness.abort(data.draw(st.sampled_from(ids)))

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def end_a_sequence(self, data: st.DataObject) -> None:
        ids = sorted(self.harness.live)
        if ids:
            expected = self.harness.live[data.draw(st.sampled_from(ids))]
            indices = sorted(expected.outcomes) or [0]
            request_id, index = expected.request.request_id, data.draw(st.sampled_from(indices))
            if self.harness.end_sequence(request_id, index):
                event("a sequence was ended")

    @precondition(lambda self: self.harness.kept)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = sorted(self.harness.kept)
        self.harness.release(data.draw(st.sampled_from(ids)))

    @precondition(lambda self: self.config.encoder_budget)
    @rule(data=st.data())
    def command_an_encode_job(self, data: st.DataObject) -> None:
        """Another worker wants an output, or will send one, or has."""
        jobs = sorted(self.harness.jobs.open)
        if jobs and (len(jobs) > 4 or data.draw(st.booleans())):
            number = data.draw(st.sampled_from(jobs))
            self.harness.end_job(number, commits=data.draw(st.booleans()))
            return
        most = min(self.config.encoder_budget, self.config.encoder_cache_tokens)
        contents = [h for h, length in sorted(INPUT_LENGTHS.items()) if length <= most]
        content = data.draw(st.sampled_from(contents))
        is_arrival = data.draw(st.booleans())
        self.harness.begin_job(content, INPUT_LENGTHS[content], is_arrival=is_arrival)
        event("an encode job")

    @precondition(lambda self: self.harness.awaiting)
    @rule(data=st.data())
    def hear_of_another_worker(self, data: st.DataObject) -> None:
        """Its blocks arrive, all or some, or never will."""
        request_id = data.draw(st.sampled_from(self.harness.awaiting))
        match data.draw(st.sampled_from(["blocks", "all", "all and a token", "failure"])):
            case "blocks":
                self.harness.arrive(request_id, data.draw(st.integers(1, 4)))
            case "all":
                self.deliver(request_id, with_token=False)
            case "all and a token":
                self.deliver(request_id, with_token=True)
            case "failure":
                self.harness.fail(request_id)

    def deliver(self, request_id: str, *, with_token: bool) -> None:
        expected = self.harness.live[request_id]
        if expected.request.spec.params.num_sequences > 1 or expected.request.grammar is not None:
            with_token = False
        self.harness.deliver(request_id, with_token=with_token)

    @rule(data=st.data())
    def turn_a_rare_knob(self, data: st.DataObject) -> None:
        harness = self.harness
        match data.draw(st.sampled_from(["pause", "reset", "evict", "replay", "unknown"])):
            case "pause" if harness.is_paused:
                harness.resume()
            case "pause":
                harness.pause()
            case "reset":
                harness.reset_prefix_cache()
            case "evict":
                group = data.draw(st.integers(0, len(harness.groups) - 1))
                block_ids = st.integers(1, harness.groups[group].pool.num_blocks)
                harness.evict(data.draw(st.lists(block_ids, max_size=4)), group)
            case "replay":
                harness.replay()
            case "unknown":
                assert self.scheduler.abort("unknown") == []
                self.scheduler.commit_external("unknown", 0)
                self.scheduler.fail_external("unknown")
                self.scheduler.release("unknown")

    # How it is checked.

    @invariant()
    def nothing_is_lost(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        """Everything that is left ends, in a bounded number of steps, as it would alone."""
        if not hasattr(self, "scheduler"):
            return
        harness = self.harness
        if harness.is_paused:
            harness.resume()
        for _ in range(100 + 20 * self.total_tokens):
            for request_id in list(harness.kept):
                harness.release(request_id)
            for request_id in harness.awaiting:
                self.deliver(request_id, with_token=True)
            for number in list(harness.jobs.open):
                harness.end_job(number, commits=True)
            if not self.scheduler.has_work:
                break
            self.step_ahead(lambda: None)
        assert not harness.live, f"starved: {sorted(harness.live)}"
        harness.check_empty()
        assert not harness.runner.known, "the runner was not told to forget"
        harness.replay()

    def note(self, plan: StepPlan) -> None:
        """For `--hypothesis-show-statistics`: what is reached."""
        if plan.swap_in:
            event("something came back from the host")
        if plan.copies:
            event("a block was copied")
        if self.scheduler.stats().num_preemptions:
            event("something was preempted")
        if self.scheduler.stats().num_returns:
            event("something was given back")
        if self.scheduler.stats().num_accepted_tokens:
            event("a draft was right")


TestTheSchedulerLosesNothing = SchedulerMachine.TestCase
TestTheSchedulerLosesNothing.settings = settings(max_examples=50, stateful_step_count=25)


class ManyRuns(SchedulerMachine):
    """The same for longer."""


TestTheSchedulerLosesNothingInManyRuns = pytest.mark.timeout(600)(
    pytest.mark.nightly(ManyRuns.TestCase)
)
TestTheSchedulerLosesNothingInManyRuns.settings = settings(
    max_examples=1000, stateful_step_count=80
)
