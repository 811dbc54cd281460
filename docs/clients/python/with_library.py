"""A client of Baton by its own library: its wheel without extras, which needs no torch.

python with_library.py HOST:PORT[,HOST:PORT...] PROMPT
"""

import json
import os
import secrets
import sys
import time

from baton import Client, Generation, SamplingParams
from baton.errors import DeadlineExceededError, OverloadedError, UnavailableError

LARGEST_PAUSE = 5.0  # seconds between two tries


def main(addresses: list[str], prompt: str) -> None:
    # Of several routers the first that answers is asked. A generation whose router is lost goes on
    # with another one, behind the tokens that are here, and its reader does not notice.
    with Client(addresses, token=os.environ.get("BATON_TOKEN")) as client:
        two = SamplingParams(max_tokens=24, n=2, temperature=0.8, seed=7, ignore_eos=True)
        generation = ask(client, prompt, two, timeout=30.0)
        for chunk in generation:  # of both sequences, in any mixture, each in its order
            print(chunk.sequence_index, repr(chunk.text), file=sys.stderr)
        for index, one in enumerate(generation.completions()):
            tell(sequence=index, text=one.text, token_ids=one.token_ids)
        cancel(client, prompt)
        miss_deadline(client, prompt)


def ask(client: Client, prompt: str, params: SamplingParams, timeout: float) -> Generation:
    """A generation that a router has accepted; `timeout` is for all of it, in seconds.

    A router that has too much to do says when to ask again. UNAVAILABLE comes where none answers,
    or none has workers, and may pass as well.
    """
    deadline, pause = time.monotonic() + timeout, 0.1
    traceparent = ("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")
    while True:
        left = deadline - time.monotonic()
        generation = client.generate(prompt, params, timeout=left, metadata=[traceparent])
        try:
            print("runs on", generation.accepted.placement.decode_worker, file=sys.stderr)
            return generation
        except OverloadedError as error:
            pause = error.retry_after
        except UnavailableError:
            pause = min(2.0 * pause, LARGEST_PAUSE)
        if time.monotonic() + pause > deadline:
            raise DeadlineExceededError(f"no worker took the request within {timeout:g} s")
        time.sleep(pause)


def cancel(client: Client, prompt: str) -> None:
    """Leaving the block ends it everywhere: workers give back what it held."""
    num_tokens = 0
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    with ask(client, prompt, params, timeout=30.0) as generation:
        for chunk in generation:
            num_tokens += len(chunk.token_ids)
            if num_tokens >= 5:
                break
    tell(cancelled_after=num_tokens)


def miss_deadline(client: Client, prompt: str) -> None:
    """Every process knows the deadline; none computes anything for it that comes too late."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    try:
        ask(client, prompt, params, timeout=1.0).text()
    except DeadlineExceededError:
        tell(deadline="exceeded")


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2])
