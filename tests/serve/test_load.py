"""The load of `benchmarks/serve_load.py`, short: none lost, none hung, seeded answers the same as alone."""

from __future__ import annotations

import asyncio
import os

from benchmarks.serve_load import DRAFTERS, asks, load, resident

from forerun.engine.loaded import LoadedModel
from forerun.serve.limits import Limits
from forerun.serve.server import Settings
from tests.serve.house import NAME, opened

REQUESTS = 100


def test_a_load_with_a_small_cache(model: LoadedModel) -> None:
    """So small a cache that texts have to step back for each other."""
    settings = Settings(NAME, "suffix", max_batch=8, cache_tokens=512, limits=Limits(queue=24, texts=4))
    many = asks(REQUESTS, NAME, seed=3, cancelled=0.1, longest=32)
    assert {ask.body["speculation"]["drafter"] for ask in many} == set(DRAFTERS)
    with opened(model, settings) as house:
        report = asyncio.run(load(house.address, many, 32, REQUESTS // 2, lambda: resident(os.getpid())))
        assert report.faults(most_growth=0.2) == []
        assert report.cancelled > 3
        assert report.compared == REQUESTS // 2
        assert house.eventually(lambda: house.idle)
        house.check_integrity()
        assert house.service.engines.first.statistics.preemptions > 0
        assert set(house.service.engines.made) == {"suffix", "ngram", "recycling", "lookahead"}
        assert house.get("/health").status_code == 200
