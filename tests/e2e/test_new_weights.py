"""Workers of a cluster are replaced, one after the other, by workers with other weights under the
same name: each answer is of one of both, as docs/operations.md says."""

import re
from pathlib import Path

import pytest

from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster import named_clusters
from tests.support.cluster.checkpoints import greedy, prompt_of, save_edited
from tests.support.cluster.rolling import Pools, Question, is_busy, under_load
from tests.support.cluster.scraped import scrape
from tests.support.cluster.slowness import slowed
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import DECODE_WORKERS
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(600)]

NUM_READERS = 6
MAX_TOKENS = 120
LENGTHS = (7, 60, 300, 500)
ORDER = ("prefill-0", "decode-0", "decode-1", "prefill-1")
LOST = "UnavailableError: .* other weights than the answer began with"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the new weights."""
    folder = tmp_path_factory.mktemp("new") / "tiny"
    save_edited(folder, num_rows=100)
    return str(folder)


@pytest.fixture(scope="module")
def questions(new: str) -> list[Question]:
    """Questions with the answers that transformers gives with the old weights and the new."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    made = []
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        old_answer, new_answer = (
            (tuple(greedy(model, prompt, MAX_TOKENS)),) for model in (locate("tiny"), new)
        )
        assert old_answer != new_answer
        made.append(Question(tuple(prompt), params, old_answer, new_answer))
    return made


def turn(link: Path, folder: str) -> None:
    """Points a link to a folder, at once."""
    aside = link.with_name("aside")
    aside.symlink_to(folder)
    aside.replace(link)


def num_weights(running: Pools) -> float:
    """Returns how many different weights a router sees."""
    endpoint = running.routers[0].metrics_endpoint
    assert endpoint is not None
    return scrape(endpoint)["baton_distinct_weights"].total("baton_distinct_weights")


# Longer than the longest answer takes on a slow worker, as the page asks for, and shorter.
@pytest.mark.parametrize("drain_s", [20.0, 0.3], ids=["long drain", "short drain"])
async def test_new_weights_under_load_mix_in_no_answer(drain_s, new, questions, tmp_path):
    link = tmp_path / "model"
    turn(link, locate("tiny"))
    with named_clusters.rolling(drain_s, f"tiny={link}") as running:
        processes = {process.name: process for process in running.workers}
        assert {*processes} == {*ORDER}
        async with under_load(running, questions, NUM_READERS) as tally:
            assert (tally.num_of_new_weights, num_weights(running)) == (0, 1.0)
            turn(link, new)
            for name in ORDER:
                streams = {name} & {*DECODE_WORKERS}
                with slowed(running.cluster, *streams):
                    if streams:  # to lose
                        await until_observed(lambda n=name: is_busy(processes[n]), what=name)
                    await running.replace(processes[name])
                await tally.more(NUM_READERS)
                assert num_weights(running) == (1.0 if name == ORDER[-1] else 2.0)
            await tally.more(NUM_READERS)
            num_of_old = tally.num_answered - tally.num_of_new_weights
            await tally.more(NUM_READERS)
        print(f"\n{tally}; seconds to the end: {running.drains}")
        assert num_of_old == tally.num_answered - tally.num_of_new_weights > NUM_READERS
        assert tally.num_migrations > 0
        lost = [why for why in tally.failures if not re.match(LOST, why)]
        assert lost == []
        assert drain_s < 1.0 or not tally.failures
        await until_nothing_is_held(running.cluster)
