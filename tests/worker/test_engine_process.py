"""Process of a worker's engine: as the settings say, and as the device allows."""

import logging

import pytest

from baton.errors import InvalidArgumentError
from baton.worker.engine_process import child_for
from baton.worker.settings import WorkerSettings


def settings(**changes: object) -> WorkerSettings:
    return WorkerSettings(redis_url=None, **changes)


def test_engine_steps_in_a_thread_where_the_settings_say_so():
    assert child_for(settings(device="cpu", engine_process="no")) is None


def test_engine_on_a_cpu_has_a_process_by_default():
    child = child_for(settings(device="cpu"))
    assert child is not None
    child.kill()
    child.reap()
    child.close()


def test_engine_process_on_a_gpu_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r"engine_process: is yes, but .* GPU"):
        child_for(settings(device="cuda:0", engine_process="yes"))


def test_engine_stays_in_a_thread_on_a_gpu_and_says_why(caplog):
    with caplog.at_level(logging.INFO):
        assert child_for(settings(device="cuda:0", engine_process="auto")) is None
    assert "steps in a thread: the KV pools are memory of a GPU" in caplog.text
