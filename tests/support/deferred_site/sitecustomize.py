"""Deferred device in every process whose PYTHONPATH names this folder and the repository's."""

from tests.support.engine import deferred_stream

deferred_stream.install()
