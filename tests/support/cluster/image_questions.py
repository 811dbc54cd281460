"""Questions about images, asked by clients of a router; transformers' answers are right."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL.Image import Image as PillowImage

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client, Image
from baton.client.generation import AsyncGeneration
from tests.support.cluster.image_requests import GREEDY, NUM_TOKENS
from tests.support.cluster.scraped import scrape
from tests.support.engine.images import IMAGE_TOKEN, image, is_greedy, words
from tests.support.router.images import encoded

_INPUTS = "baton_encoder_inputs_total"


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of words and images for the model in the folder `path`."""

    path: str
    text: str
    images: tuple[PillowImage, ...]

    @property
    def _files(self) -> list[Image]:
        return [Image(encoded(each)) for each in self.images]

    def ask(self, client: Client, request_id: str = "") -> tuple[int, ...]:
        """Returns the answer's tokens."""
        generation = client.generate(self.text, GREEDY, request_id=request_id, images=self._files)
        return tuple(generation.token_ids())

    def is_answer(self, token_ids: Sequence[int]) -> bool:
        """Returns whether these tokens are transformers' answer."""
        is_whole = len(token_ids) == NUM_TOKENS
        return is_whole and is_greedy(self.path, self.text, self.images, token_ids)

    def begin(self, client: AsyncClient) -> AsyncGeneration:
        return client.generate(self.text, GREEDY, images=self._files)


def question_of(path: str, seed: int, *images: PillowImage) -> Question:
    """Returns a question of its own about an image of its own, after `images`."""
    shown = (*images, image(seed))
    marks = " ".join([IMAGE_TOKEN] * len(shown))
    text = f"{words(60, seed)} {marks} {words(5, -seed)}"
    return Question(path, text, shown)


def num_inputs(cluster: LocalCluster, source: str) -> float:
    """Returns how many encoder inputs one source has encoded, as the router counts them."""
    return scrape(cluster.metrics_endpoints["router"])[_INPUTS].total(_INPUTS, source=source)
