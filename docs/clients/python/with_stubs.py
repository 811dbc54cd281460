"""A client of Baton by stubs that protoc has made; knows nothing of `baton.client.client`.

pip install grpcio grpcio-tools grpcio-status
python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
    protos/baton/v1/inference.proto protos/baton/v1/sampling.proto
python with_stubs.py HOST:PORT[,HOST:PORT...] PROMPT
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, sampling_pb2

LARGEST_PAUSE = 5.0  # seconds between two tries
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A name is resolved again a second after its routers were replaced, not half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A router that falls silent is noticed within some seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


@dataclass
class Sequence:
    """Output of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: int = pb.FINISH_REASON_UNSPECIFIED
    has_rest: bool = False

    def add(self, chunk: pb.TokenChunk) -> str:
        """Takes some tokens; returns their text, which is empty if it has come before.

        (sequence, position) names a token: another router, or the same once more, says none twice.
        Text that was held back may come behind the last token, with no token of its own.
        """
        if chunk.token_ids:
            assert chunk.position == len(self.token_ids), "tokens are left out, or come twice"
            self.token_ids += chunk.token_ids
            self.reason = chunk.finish_reason
        elif self.has_rest:
            return ""
        else:
            self.has_rest = True
        self.text += chunk.text
        return chunk.text


class Client:
    """Routers, of which the first that answers is asked."""

    def __init__(self, addresses: list[str], token: str | None) -> None:
        self._channels = [grpc.insecure_channel(address, OPTIONS) for address in addresses]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._token = token
        self._asked = 0

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def generate(
        self, request: pb.GenerateRequest, sequences: list[Sequence], timeout: float
    ) -> Generator[str, None, None]:
        """Text as it comes; `sequences`, one for each that is asked for, have it all in the end.

        Closing the iterator cancels the call. `timeout`: seconds for all of it, tries among them.
        Goes on behind what has come where a router is lost.
        """
        request = pb.GenerateRequest.FromString(request.SerializeToString())
        deadline, pause = time.monotonic() + timeout, 0.1
        metadata = [("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01")]
        if self._token:
            metadata.append(("authorization", f"Bearer {self._token}"))
        while True:
            left = deadline - time.monotonic()
            call = self._stubs[self._asked].Generate(request, timeout=left, metadata=metadata)
            try:
                for event in call:
                    kind = event.WhichOneof("event")
                    if kind == "accepted":
                        # Of a router that goes on, the same seed has to be asked for.
                        request.sampling.seed = event.accepted.seed
                        pause = 0.1
                    elif kind == "tokens":
                        yield sequences[event.tokens.sequence_index].add(event.tokens)
                return
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    pause = retry_delay(error)
                elif error.code() is grpc.StatusCode.UNAVAILABLE:
                    pause = min(2.0 * pause, LARGEST_PAUSE)
                    self._asked = (self._asked + 1) % len(self._stubs)
                else:
                    raise
                if time.monotonic() + pause > deadline:
                    raise
            finally:
                call.cancel()
            if any(one.token_ids for one in sequences):
                del request.continue_from[:]
                for one in sequences:
                    request.continue_from.add(ids=one.token_ids, finish_reason=one.reason)
            time.sleep(pause)


def retry_delay(error: grpc.RpcError) -> float:
    """For how long a router that has too much to do would not be asked, in seconds."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(retry):
            return retry.retry_delay.ToTimedelta().total_seconds()
    raise error  # a message that is too large, which none would take


def main(addresses: list[str], prompt: str) -> None:
    client = Client(addresses, os.environ.get("BATON_TOKEN"))
    two = sampling_pb2.SamplingParams(max_tokens=24, n=2, temperature=0.8, seed=7, ignore_eos=True)
    sequences = [Sequence(), Sequence()]
    request = pb.GenerateRequest(text=prompt, sampling=two)
    for text in client.generate(request, sequences, timeout=30.0):
        print(repr(text), file=sys.stderr)
    for index, one in enumerate(sequences):
        tell(sequence=index, text=one.text, token_ids=one.token_ids)
    cancel(client, prompt)
    miss_deadline(client, prompt)
    client.close()


def cancel(client: Client, prompt: str) -> None:
    """Workers give back what the generation held."""
    long = sampling_pb2.SamplingParams(max_tokens=300, ignore_eos=True)
    request, sequence = pb.GenerateRequest(text=prompt, sampling=long), Sequence()
    generation = client.generate(request, [sequence], timeout=30.0)
    for _ in generation:
        if len(sequence.token_ids) >= 5:
            break
    generation.close()
    tell(cancelled_after=len(sequence.token_ids))


def miss_deadline(client: Client, prompt: str) -> None:
    """Every process knows the deadline; none computes anything for it that comes too late."""
    long = sampling_pb2.SamplingParams(max_tokens=1500, ignore_eos=True)
    request = pb.GenerateRequest(text=prompt, sampling=long)
    try:
        for _ in client.generate(request, [Sequence()], timeout=1.0):
            pass
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            tell(deadline="exceeded")


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2])
