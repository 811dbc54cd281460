"""Codecs of commands, reports and readings: what comes out is what went in."""

import dataclasses
import os
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import errors
from baton.cluster.events.kv_events import KvEvents
from baton.engine.core import commands, reports
from baton.engine.core.process.command_codec import decode_command, encode_command
from baton.engine.core.process.reading_page import ReadingPage
from baton.engine.core.process.report_codec import decode_report, encode_report
from baton.engine.metering.step_times import StepTimes, TimeSpent
from baton.engine.metering.work_meter import WorkDone
from baton.engine.outputs import SequenceUpdate, StepOutput
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose, ReturnCost
from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.kv.memory_report import MemoryReport
from baton.engine.scheduler.plan import ExternalAllocation, TokenLogprobs
from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.sequences.config import Preemption
from baton.errors import BatonError, InvalidArgumentError, OverloadedError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.models.images.families import IMAGE_FORMATS
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_format_codec import decode_image_format
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams

COUNTS = st.integers(0, 2**40)
FLOATS = st.floats(allow_nan=False)
IDS = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
TABLES = st.lists(TOKENS, max_size=3).map(tuple)
HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)
LOGPROBS = st.builds(
    TokenLogprobs, FLOATS, TOKENS, st.lists(FLOATS, max_size=3).map(tuple)
)  # fmt: skip
ERRORS = st.one_of(
    st.builds(InvalidArgumentError, IDS, IDS),
    st.builds(OverloadedError, IDS, FLOATS),
    st.builds(errors.UnavailableError, IDS),
)
UPDATES = st.builds(
    SequenceUpdate,
    request_id=IDS,
    index=st.integers(0, 16),
    token_id=st.none() | COUNTS,
    position=COUNTS,
    logprobs=st.none() | LOGPROBS,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    num_computed_tokens=COUNTS,
    num_cached_tokens=COUNTS,
    block_ids=TABLES,
    score=st.none() | FLOATS,
    failure=st.none() | IDS,
    prompt_logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
)
SPENT = st.builds(TimeSpent, COUNTS, FLOATS, FLOATS, FLOATS)
STEPS = st.builds(
    StepOutput,
    updates=st.lists(UPDATES, max_size=6).map(tuple),
    external=st.lists(st.builds(ExternalAllocation, IDS, TABLES, COUNTS), max_size=3).map(tuple),
    cache_events=st.builds(KvEvents, HASHES, HASHES, st.booleans()),
    made_progress=st.booleans(),
    times=st.builds(StepTimes, FLOATS, FLOATS, SPENT, SPENT),
    preempted=st.lists(st.tuples(IDS, st.sampled_from(Preemption)), max_size=3).map(tuple),
    held_outputs=st.lists(
        st.builds(HeldOutput, COUNTS, st.lists(COUNTS).map(tuple), st.booleans()), max_size=3
    ).map(tuple),
)
ANSWERS = st.one_of(
    st.none(), COUNTS, TABLES, st.builds(MemoryReport, COUNTS, COUNTS, COUNTS, COUNTS)
)
REPORTS = st.one_of(
    st.builds(reports.Begun, COUNTS, IDS),
    st.builds(reports.Answered, COUNTS, ANSWERS),
    st.builds(reports.Stepped, STEPS),
    st.builds(reports.Failed, IDS),
)
PARAMS = SamplingParams(
    max_tokens=9,
    temperature=1,
    seed=2**64 - 1,
    n=2,
    best_of=3,
    logit_bias=((3, -1.5),),
    bad_words=("bad",),
    bad_token_ids=((1, 2),),
    stop=("\n",),
    early_stopping=EarlyStopping.NEVER,
    grammar=Grammar(GrammarKind.REGEX, "a+"),
    speculate=False,
)
REQUEST = EngineRequest(
    "id \0 \N{GRINNING FACE}",
    tuple(range(200_000)),
    PARAMS,
    199_990,
    purpose=Purpose.PREFILL,
    kv_source=KvSource.EXTERNAL,
    num_external_tokens=16,
    salt=b"\xff",
    block_hashes=(bytes(16), os.urandom(16)),
    outputs=((1, 2), None, ()),
    first_token_deadline=2.5,
    return_cost=ReturnCost(0.1, 0.2, 0.3),
)
JOB = EncodeJob(EncoderInput(bytes(16), 0, 4), -1, 0.5, 2.5)
COMMANDS: list[commands.Command] = [
    commands.Add(1, REQUEST),
    commands.Add(2, replace(REQUEST, token_ids=(1,), outputs=()), 1),
    commands.Abort("a"),
    commands.CommitExternal("a", 7, -0.5),
    commands.CommitExternal("a", None),
    commands.FailExternal("a"),
    commands.Suspend("a"),
    commands.EndSequence("a", 2, FinishReason.STOP_STRING),
    commands.Pause(),
    commands.Resume(),
    commands.Unpin("name"),
    commands.Encode(8, JOB, only_cached=True),
    commands.ExpectOutput(9, JOB),
    commands.CommitOutput(9),
    commands.ReleaseOutput(8),
    commands.FlushCache(3, None),
    commands.FlushCache(4, (bytes(16),)),
    commands.Pin(5, "name", (bytes(16), os.urandom(16))),
    commands.ReportMemory(6),
    commands.CompileGrammar(7, REQUEST),
    commands.Ping(8),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_command_codec_returns_an_equal_command(command):
    assert decode_command(encode_command(command)) == command


def test_command_codec_keeps_the_tensors_of_encoder_inputs():
    tensors = {"pixel_values": TensorData("float32", (1, 2), bytes(range(8)))}
    image = EncoderInput(b"\xff" * 16, 3, 4, tensors)
    command = commands.Add(1, replace(REQUEST, encoder_inputs=(image,)))
    decoded = decode_command(encode_command(command))
    assert isinstance(decoded, commands.Add)
    assert decoded == command
    assert decoded.request.encoder_inputs[0].tensors == tensors


@given(REPORTS)
def test_report_codec_returns_an_equal_report(report):
    assert decode_report(encode_report(report)) == report


@given(ERRORS)
def test_report_codec_keeps_type_and_fields_of_errors(error):
    output = StepOutput((), (), KvEvents((), (), False), True, TIMES, failed={"a": error})
    refused = decode_report(encode_report(reports.Refused("a", error)))
    failed = decode_report(encode_report(reports.QueryFailed(3, error)))
    stepped = decode_report(encode_report(reports.Stepped(output)))
    assert isinstance(refused, reports.Refused)
    assert isinstance(failed, reports.QueryFailed)
    assert isinstance(stepped, reports.Stepped)
    for found in (refused.error, failed.error, stepped.output.failed["a"]):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert vars(found) == vars(error)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in BatonError.__subclasses__() if kind.__module__ == BatonError.__module__],
)
def test_report_codec_knows_every_error(kind):
    arguments = ("field", "problem") if kind is InvalidArgumentError else ("message",)
    refused = decode_report(encode_report(reports.Refused("a", kind(*arguments))))
    assert isinstance(refused, reports.Refused)
    assert type(refused.error) is kind


TIMES = StepTimes(1.0, 2.0, TimeSpent(), TimeSpent(1, 0.1, 0.2, 0.3))


def test_step_codec_keeps_pooled_outputs():
    pooled = np.array([0.1, -2.5], np.float32)
    update = SequenceUpdate("a", 0, None, 0, pooled=pooled)
    output = StepOutput((update,), (), KvEvents((), (), False), True, TIMES)
    report = decode_report(encode_report(reports.Stepped(output)))
    assert isinstance(report, reports.Stepped)
    (found,) = report.output.updates
    assert found.pooled is not None
    assert found.pooled.tolist() == pooled.tolist()


def reading(number: int, idle_since: float | None = None) -> reports.EngineReading:
    names = [each.name for each in dataclasses.fields(SchedulerStats)]
    stats = SchedulerStats(**{name: number + i for i, name in enumerate(names)})
    work = WorkDone(number, 2, 3, 4, 0.5, 6)
    return reports.EngineReading(stats, work, TimeSpent(number, 0.1, 0.2, 0.3), 0, idle_since)


def test_reading_page_returns_the_latest_reading():
    page = ReadingPage.create()
    other = ReadingPage(os.dup(page.descriptor))
    for number in range(1, 6):
        idle_since = 1e9 / 3 if number % 2 else None
        page.write(reading(number, idle_since))
        assert other.read() == reading(number, idle_since)
    page.close()
    other.close()


def test_reading_page_returns_the_earlier_reading_during_a_write():
    page = ReadingPage.create()
    page.write(reading(1))
    page.write(reading(2))
    for start in (10, 200):  # of the second, which is in the first place
        page._memory[start] ^= 0xFF
    assert page.read() == reading(1)
    page.close()


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_image_format_codec_keeps_fields_and_type(kind):
    fields = (each.name for each in dataclasses.fields(kind) if each.init)
    images = kind(**{name: (1, 3, 8, 8) if name == "shape" else 7 for name in fields})
    decoder = msgspec.msgpack.Decoder(ImageFormat | None, dec_hook=decode_image_format)
    decoded = decoder.decode(msgspec.msgpack.encode(images))
    assert (decoded, type(decoded)) == (images, kind)


@pytest.mark.parametrize("content", [{"kind": "Images"}, {"kind": "FixedImages"}, {}, 1])
def test_image_format_codec_refuses_other_fields(content):
    decoder = msgspec.msgpack.Decoder(ImageFormat | None, dec_hook=decode_image_format)
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(content))
