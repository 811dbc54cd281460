"""Cluster of a text model: its processes spend nothing on images."""

import psutil
import pytest

from tests.support.cluster.scraped import scrape

pytestmark = pytest.mark.e2e


def test_router_of_text_model_starts_no_image_process(cluster):
    assert psutil.Process(cluster.process("router").pid).children(recursive=True) == []


def test_worker_of_text_model_has_no_encoder_cache(cluster):
    name = "baton_encoder_blocks"
    for worker in ("prefill-0", "decode-0"):
        assert scrape(cluster.metrics_endpoints[worker])[name].total(name) == 0
