"""`baton generate`: one prompt, streamed to stdout."""

import dataclasses
import json
import sys

from baton.client import Client, Finished, Generation
from baton.sampling import SamplingParams


def stream(client: Client, prompt: str, params: SamplingParams) -> Generation:
    """Writes the answer to stdout as it comes. Interrupted, it cancels the generation."""
    last = ""
    with client.generate(prompt, params) as generation:
        try:
            for chunk in generation:
                last = chunk.text or last
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        finally:
            if last and not last.endswith("\n"):
                print(flush=True)
    return generation


def as_json(client: Client, prompt: str, params: SamplingParams) -> str:
    """The whole answer as one object."""
    with client.generate(prompt, params) as generation:
        text = generation.text()
    accepted, finished = generation.accepted, generation.finished
    assert finished is not None, "the text was complete"
    answer = {
        "request_id": accepted.request_id,
        "text": text,
        "token_ids": generation.token_ids(),
        "finish_reason": finished.reason,
        "prefill_worker": accepted.placement.prefill_worker,
        "decode_worker": accepted.placement.decode_worker,
        "usage": dataclasses.asdict(finished.usage),
        "seconds": dataclasses.asdict(finished.timings),
    }
    return json.dumps(answer, ensure_ascii=False)


def stats_line(finished: Finished) -> str:
    """What it used and took, on one line."""
    usage, timings = finished.usage, finished.timings
    first = timings.time_to_first_token
    decoding = timings.total - first
    rate = (usage.num_output_tokens - 1) / decoding if decoding > 0 else 0.0
    return (
        f"[{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_prompt_tokens} cached), "
        f"{usage.num_output_tokens} output tokens, first after {first * 1000:.0f} ms, "
        f"then {rate:.0f} tokens/s; ended by {finished.reason.replace('_', ' ')}]"
    )
