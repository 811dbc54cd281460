"""`baton generate`: one prompt, its answer on stdout."""

import dataclasses
import json
import sys
from typing import Any

from baton.client.client import Completion, Finished, Generation, TokenLogprobs
from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams


def check_printable(params: SamplingParams) -> None:
    """Raises `InvalidArgumentError` for parameters whose results only `as_json` shows."""
    for option, is_wanted in (
        ("--logprobs", params.logprobs),
        ("--prompt-logprobs", params.prompt_logprobs is not None),
    ):
        if is_wanted:
            raise InvalidArgumentError(option, "is printed only with --json; add it")


def show(generation: Generation, params: SamplingParams) -> Finished:
    """Writes the answer to stdout as it comes, several one after the other. Cancels the generation
    if interrupted. Returns its end."""
    with generation:
        if params.n == 1:
            _stream(generation)
        else:
            _print_all(generation)
    assert generation.finished is not None, "it was read to its end"
    return generation.finished


def _stream(generation: Generation) -> None:
    last = ""
    try:
        for chunk in generation:
            last = chunk.text or last
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    finally:
        if last and not last.endswith("\n"):
            print(flush=True)


def _print_all(generation: Generation) -> None:
    for number, completion in enumerate(generation.completions(), 1):
        score = completion.finished.score
        print(f"[{number}]" if score is None else f"[{number}, score {score:.4f}]")
        print(completion.text.removesuffix("\n"))


def as_json(generation: Generation, params: SamplingParams) -> str:
    """Returns the answer as one JSON object, with a list of its completions."""
    with generation:
        completions = generation.completions()
    accepted, finished = generation.accepted, generation.finished
    assert finished is not None, "it was read to its end"
    answer: dict[str, Any] = {
        "request_id": accepted.request_id,
        "prefill_worker": accepted.placement.prefill_worker,
        "decode_worker": accepted.placement.decode_worker,
        "usage": dataclasses.asdict(finished.usage),
        "seconds": dataclasses.asdict(finished.timings),
    }
    if params.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [_token_logprobs(t) for t in generation.prompt_logprobs]
    answer["completions"] = [_completion(completion, params) for completion in completions]
    return json.dumps(answer, ensure_ascii=False)


def _completion(completion: Completion, params: SamplingParams) -> dict[str, Any]:
    finished = completion.finished
    answer: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": finished.reason,
    }
    if finished.stop_string:
        answer["stop_string"] = finished.stop_string
    if finished.stop_token_id is not None:
        answer["stop_token_id"] = finished.stop_token_id
    if finished.score is not None:
        answer["score"] = finished.score
    if params.logprobs:
        tops = completion.top_logprobs or ({},) * len(completion.logprobs)
        answer["logprobs"] = [
            _token_logprobs(TokenLogprobs(logprob, top))
            for logprob, top in zip(completion.logprobs, tops, strict=True)
        ]
    return answer


def _token_logprobs(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": t, "logprob": value} for t, value in logprobs.top.items()]
    return {"logprob": logprobs.logprob, "top": top}


def stats_line(finished: Finished) -> str:
    """Returns usage and timings on one line."""
    usage, timings = finished.usage, finished.timings
    first = timings.time_to_first_token
    decoding = timings.total - first
    rate = (usage.num_output_tokens - 1) / decoding if decoding > 0 else 0.0
    return (
        f"[{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_prompt_tokens} cached), "
        f"{usage.num_output_tokens} output tokens, first after {first * 1000:.0f} ms, "
        f"then {rate:.0f} tokens/s; ended by {finished.reason.replace('_', ' ')}]"
    )
