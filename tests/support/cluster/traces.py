"""Rules that hold for every trace of a request."""

from tests.support.serving.otlp_receiver import ReceivedSpan

# Calls between processes: the span of the callee, and that of its caller.
EDGES = {
    ("prefill.call", "admit.prefill"),
    ("decode.call", "admit.decode"),
    ("encode.call", "encode"),
    ("kv.send", "kv.transfer"),
    ("encoder.send", "encoder.transfer"),
    # Fetches of encoder outputs begin before the worker's span of the call.
    ("encoder.transfer", "admit.prefill"),
    ("encoder.transfer", "admit.decode"),
}
CALLS = ("prefill.call", "decode.call", "encode.call")


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def share_told(spans: list[ReceivedSpan]) -> float:
    """Returns the share of the first span's time that the others cover together, without those of
    whole calls."""
    root, *others = spans
    covered, until = 0.0, root.start
    for span in others:
        if span.name in CALLS:
            continue
        begin, end = max(span.start, until), min(span.end, root.end)
        covered += max(0.0, end - begin)
        until = max(until, end)
    return covered / root.seconds


def check_tree(spans: list[ReceivedSpan]) -> None:
    """One root, whose children are the router's spans. Those of a worker are in its call, which is
    a child of the router's wait for its admission, as the source of a transfer is of the claim."""
    root = spans[0]
    assert (root.name, root.parent_id, root.kind) == ("generate", "", "SERVER")
    ids = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = ids[span.parent_id]
        if span.kind == "SERVER" or span.name == "encoder.transfer":
            assert (span.name, parent.name) in EDGES
            assert parent.kind == "CLIENT"
        else:
            assert (
                parent.name == "generate" if span.service == root.service else parent.name in CALLS
            )
            assert parent.service == span.service
