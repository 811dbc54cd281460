"""Every part of the router that a request went through is told of its end, however it ends."""

from baton_router.admission.quotas import Quota
from tests.support.router.front import front_of
from tests.support.router.scripted import READY, decode, finished, prefill_behind, tokens

ASKED = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 5}
LIMITS = Quota(tokens_per_minute=12)


async def test_request_that_admission_rejects_costs_no_tokens():
    async with front_of(decode(), limits=LIMITS, max_waiting=0) as front:
        for _ in range(3):
            response = await front.post("/v1/completions", json=ASKED)
            assert "wait at this router already" in response.json()["error"]["message"]


async def test_request_costs_its_prompt_and_the_tokens_it_got():
    workers = prefill_behind(0, 2), decode(READY, tokens(1, 1), finished())
    async with front_of(*workers, limits=LIMITS) as front:
        response = await front.post("/v1/completions", json={**ASKED, "max_tokens": 2})
        assert response.status_code == 200, response.text
        response = await front.post("/v1/completions", json=ASKED)
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(response.headers["x-ratelimit-remaining-tokens"]) <= 12 - 8
