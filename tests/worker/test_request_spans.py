"""The spans of samples that were begun elsewhere: the prompt's chunks, then one `decode` that says
how much was there."""

from dataclasses import replace

from opentelemetry.sdk.trace import ReadableSpan

from baton.engine.client import EngineClient
from baton.engine.core.engine_thread import EngineThread
from baton.engine.request import EngineRequest
from baton.sampling import SamplingParams
from baton.serving.telemetry import stages
from baton.worker.request_spans import request_spans
from tests.support.spans import kept_spans
from tests.support.worker.reference import alone, engine_of, prompt_of

SAMPLES = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=5, n=3)
PROMPT = prompt_of(40)


async def spans_of(model: str, request: EngineRequest) -> list[ReadableSpan]:
    engine = EngineClient(EngineThread(engine_of(model, max_num_batched_tokens=24).core))
    engine.start()
    try:
        with (
            kept_spans() as exporter,
            stages.stage_of_call("generate"),
            engine.open(request) as stream,
            request_spans("w", request, stream),
        ):
            async for _ in stream.updates():
                pass
    finally:
        await engine.stop()
    return [s for s in exporter.get_finished_spans() if s.name in ("prefill.chunk", "decode")]


async def test_decode_span_includes_tokens_of_earlier_attempt(checkpoint):
    model = checkpoint("llama")
    (whole,) = alone(model, [PROMPT], SAMPLES)
    request = EngineRequest("r", tuple(PROMPT), SAMPLES, len(PROMPT), arrival_time=0.0)
    outputs = (tuple(whole[0][:50]), None, tuple(whole[2][:30]))
    *chunks, decode = await spans_of(model, replace(request, outputs=outputs))
    ranges = [
        (c.attributes["baton.prefill.begin"], c.attributes["baton.prefill.end"]) for c in chunks
    ]
    assert ranges == [(0, 24), (24, 39)]
    assert decode.name == "decode"
    assert [(e.name, dict(e.attributes)) for e in decode.events] == [
        ("migration", {"baton.num_received_tokens": 80}),
        ("first token", {}),
    ]
    assert decode.attributes["baton.decode.num_tokens"] == 10 + 30
    assert decode.start_time >= chunks[-1].end_time - 1000
