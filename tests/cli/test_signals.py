import os
import signal
import threading

import pytest

from baton.cli.local.signals import interrupted_by_signals, signals_deferred


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_termination_signals_raise_keyboard_interrupt(signum: int) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        os.kill(os.getpid(), signum)
    assert signal.getsignal(signum) is before


def test_deferred_signal_arrives_at_the_end_of_the_block() -> None:
    steps: list[str] = []

    def work() -> None:
        with interrupted_by_signals(), signals_deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["after the signal"]


def test_signals_deferred_does_nothing_in_another_thread() -> None:
    ran = threading.Event()

    def run() -> None:
        with signals_deferred():
            ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran.is_set()
