"""Process that makes spans and prints the growth of its memory in bytes.

Run as `python -m tests.support.serving.span_maker NUMBER`.
"""

import sys

import psutil

from baton.serving.logs import configure_logging
from baton.serving.telemetry.stages import stage, stage_of_call
from baton.serving.telemetry.tracing import tracing


def main() -> None:
    configure_logging("INFO", "human", "router")
    process = psutil.Process()
    with tracing("router"):
        before = 0
        for number in range(int(sys.argv[1])):
            with stage_of_call("generate") as span:
                span.set_attributes({f"baton.{i}": "x" * 100 for i in range(10)})
                with stage("place"):
                    pass
            if number == 5000:  # the queue is full by now
                before = process.memory_info().rss
        print(process.memory_info().rss - before, flush=True)


if __name__ == "__main__":
    main()
