"""Metrics of images, by model."""

from prometheus_client import CollectorRegistry

from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.sampling import SamplingParams
from baton_router.call.request import Request
from baton_router.metrics.image_metrics import ImageMetrics
from baton_router.routing.admission.image_budget import ImageBudget
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_pool import ImagePool


def test_image_metrics_have_each_model_and_the_budget():
    budget, pool = ImageBudget(max_held_bytes=100), ImagePool("", ImageLimits(), 2)
    data = {"pixel_values": TensorData("uint8", (70,), bytes(70))}
    images = (EncoderInput(b"i" * 16, 0, 1, data),)
    request = Request("r", (1,), SamplingParams(), encoder_inputs=images)
    budget.reserve(request, lambda _request, _error: False)
    budget.num_rejected = 3
    pool.num_busy, pool.num_restarts = 1, 2
    pool.preprocessing.observe(0.02)
    registry = CollectorRegistry()
    registry.register(ImageMetrics(budget, {"seeing": pool, "text": None}))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"baton_{name}", labels)

    assert (value("image_bytes"), value("image_budget_bytes")) == (70, 100)
    assert value("image_budget_rejections_total") == 3
    for model, number in (("seeing", 1), ("text", 0)):
        assert value("image_processes", model=model, state="busy") == number
        assert value("image_processes", model=model, state="idle") == 0
        assert value("image_process_restarts_total", model=model) == 2 * number
        assert value("image_preprocessing_seconds_count", model=model) == number
    assert value("images_waiting", model="text") == 0
