"""Metrics of images in prompts."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from baton.serving.telemetry import buckets
from baton.serving.telemetry.distribution import Distribution
from baton.serving.telemetry.families import Labels, counter, gauge, histogram
from baton_router.routing.admission.image_budget import ImageBudget

if TYPE_CHECKING:
    from baton_router.text.images.image_pool import ImagePool

_MODEL = ("model",)


class ImageMetrics:
    """Prometheus collector of the images of all models.

    Args:
        pools: processes that decode images, by model; None: the model takes no images.
    """

    def __init__(self, budget: ImageBudget, pools: "Mapping[str, ImagePool | None]") -> None:
        self._budget = budget
        self._pools = pools

    def collect(self) -> Iterable[Metric]:
        yield gauge(
            "baton_image_bytes",
            "Bytes of preprocessed images that this router holds for requests in flight.",
            self._budget.num_bytes,
        )
        yield gauge(
            "baton_image_budget_bytes",
            "Maximum of these bytes (--encoder-input-budget-bytes).",
            self._budget.max_held_bytes,
        )
        yield counter(
            "baton_image_budget_rejections_total",
            "Requests with images rejected because those in flight left no room in the budget.",
            self._budget.num_rejected,
        )
        yield gauge(
            "baton_images_waiting",
            "Images that wait for a process to decode them.",
            self._numbers(lambda pool: pool.num_waiting),
            _MODEL,
        )
        yield gauge(
            "baton_image_processes",
            "Processes that decode images: busy with one, or idle.",
            {
                **self._numbers(lambda pool: pool.num_busy, "busy"),
                **self._numbers(lambda pool: pool.num_idle, "idle"),
            },
            ("model", "state"),
        )
        yield counter(
            "baton_image_process_restarts_total",
            "Processes ended because they crashed or took too long for an image.",
            self._numbers(lambda pool: pool.num_restarts),
            _MODEL,
        )
        yield histogram(
            "baton_image_preprocessing_seconds",
            "Time of a process to decode and preprocess an image, without waiting for the process.",
            {
                (model,): Distribution(buckets.STAGE) if pool is None else pool.preprocessing
                for model, pool in self._pools.items()
            },
            _MODEL,
        )

    def _numbers(
        self, number_of: "Callable[[ImagePool], int]", *labels: str
    ) -> dict[Labels, float]:
        """Returns a number of each model, labelled by the model and `labels`."""
        return {
            (model, *labels): 0 if pool is None else number_of(pool)
            for model, pool in self._pools.items()
        }
