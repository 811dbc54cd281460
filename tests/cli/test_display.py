import io
import re
from dataclasses import replace

from rich.console import Console

from baton.cli.local.display import status_display
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cli.local.status import LoadingTimes, Status, status_of
from baton.cli.workers import print_table
from baton.client.types import Worker

LOADING = Status("prefill-0", "starting", "loading weights", 0.5)
READY = Status("prefill-0", "ready", "", 1.0)


def test_status_stays_while_a_process_does_not_answer() -> None:
    silent = Process("prefill-0", "prefill", free_port(set()), {}, admin_port=free_port(set()))
    assert status_of(silent, LOADING) == LOADING


def test_status_display_prints_a_line_per_change_off_terminal() -> None:
    output = io.StringIO()
    with status_display(Console(file=output)) as show:
        for status in (LOADING, LOADING, READY, READY):
            show([status])
    assert output.getvalue() == "prefill-0: loading weights\nprefill-0: ready\n"


def test_status_display_shows_bytes_and_time_left() -> None:
    output = io.StringIO()
    loading = replace(LOADING, num_loaded_bytes=3_100_000_000, num_weight_bytes=15_200_000_000)
    with status_display(Console(file=output, force_terminal=True, width=120)) as show:
        show([replace(loading, seconds_left=40.4), replace(loading, name="decode-0")])
    shown = "loading weights 3.1 of 15.2 GB"
    assert f"{shown}, about 40 s left" in output.getvalue()
    assert re.search(f"decode-0.*{shown}(?!,)", output.getvalue())
    small = replace(loading, num_loaded_bytes=900_000_000)
    output = io.StringIO()
    with status_display(Console(file=output)) as show:
        for status in (small, loading):
            show([status])
    assert output.getvalue() == "prefill-0: loading weights 900.0 MB of 15.2 GB\n"


def test_loading_times_follow_the_rate_of_each_process() -> None:
    times = LoadingTimes()
    loading = replace(LOADING, num_weight_bytes=1000)
    assert times.seconds_left(loading, 1.0) is None
    assert times.seconds_left(replace(loading, num_loaded_bytes=100), 2.0) is None
    assert times.seconds_left(replace(loading, num_loaded_bytes=300), 6.0) == 14.0
    assert times.seconds_left(replace(loading, num_loaded_bytes=300), 8.0) == 21.0
    assert times.seconds_left(replace(loading, num_loaded_bytes=1000), 9.0) is None


def test_status_display_draws_a_bar_per_process_on_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with status_display(console) as show:
        show([LOADING, Status("decode-0")])
        show([READY, Status("decode-0")])
    assert re.search("prefill-0.*ready.*decode-0.*starting", output.getvalue(), re.DOTALL)


def test_workers_table_calls_indexed_hashes_by_their_name() -> None:
    worker = Worker("d0", "decode", "h:1", 1, "ready", 0, 13, "h:2", "1.0")
    output = io.StringIO()
    print_table([worker], Console(file=output, width=120))
    header, row = output.getvalue().splitlines()
    assert header.split("  ")[-1].strip() == "indexed hashes"
    assert row.split()[-1] == "13"


def test_workers_table_names_models_where_several_exist() -> None:
    one = Worker("d0", "decode", "h:1", 1, "ready", 0, 13, "h:2", "1.0", "chat")
    for workers, named in (([one, replace(one, id="d1", model="coder")], True), ([one], False)):
        output = io.StringIO()
        print_table(workers, Console(file=output, width=120))
        assert ("model" in output.getvalue()) == named
        assert ("chat" in output.getvalue()) == named
