"""Calls a router by plain stubs on one channel, one call after the other, until its input ends.

    python grpc_client.py HOST:PORT

Prints {"answered": N, "failures": [...]}.
"""

import json
import sys
import time
from threading import Thread

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub


def main(address: str) -> None:
    input_ = Thread(target=sys.stdin.read, daemon=True)
    input_.start()
    answered, failures = 0, []
    with grpc.insecure_channel(address) as channel:
        tokenize = InferenceStub(channel).Tokenize
        while input_.is_alive():
            time.sleep(0.02)
            try:
                tokenize(pb.TokenizeRequest(text="import os"), timeout=20.0)
            except grpc.RpcError as error:
                failures.append(f"{error.code().name} {error.details()}")
            else:
                answered += 1
    print(json.dumps({"answered": answered, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
