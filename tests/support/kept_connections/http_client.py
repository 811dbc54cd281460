"""Sends POST requests, one after the other, until its input ends.

    python http_client.py LIBRARY URL

Prints {"answered": N, "failures": [...]}. The library is httpx or urllib3, without retries.
"""

import json
import sys
import time
from collections.abc import Callable
from threading import Thread

BODY = {"prompt": "import os"}


def _httpx(url: str) -> Callable[[], tuple[int, str]]:
    import httpx

    client = httpx.Client()

    def send() -> tuple[int, str]:
        answer = client.post(url, json=BODY)
        return answer.status_code, answer.text

    return send


def _urllib3(url: str) -> Callable[[], tuple[int, str]]:
    import urllib3

    pool = urllib3.PoolManager(retries=False)

    def send() -> tuple[int, str]:
        answer = pool.request("POST", url, json=BODY)
        return answer.status, answer.data.decode()

    return send


def main(library: str, url: str) -> None:
    input_ = Thread(target=sys.stdin.read, daemon=True)
    input_.start()
    send = {"httpx": _httpx, "urllib3": _urllib3}[library](url)
    answered, failures = 0, []
    while input_.is_alive():
        time.sleep(0.005)
        try:
            status, body = send()
        except Exception as error:
            failures.append(repr(error))
            continue
        if status == 200:
            answered += 1
        else:
            failures.append(f"{status} {body}")
    print(json.dumps({"answered": answered, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
