"""Runs with a cache that learns: residents are swapped while tokens are decoded."""

from math import ceil
from pathlib import Path

from hot import CALLS_BEFORE_FILL, Hot, HotResult, experts_per_layer
from probe import decode

MAX_MIB = "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB"
UPDATE_RATE = "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE"
MISS = "LLAMA_ARG_MOE_HOT_CACHE_MISS"
FREE_COPIES = "MOE_HOT_TEST_FREE_COPIES"  # the most swaps that can be
# An empty value counts as none: as fast as it pays, which is faster than any number.
AS_IT_PAYS = {UPDATE_RATE: ""}
RULES = ["cpu", "copy", "auto"]
SHARE = 0.7  # of all experts and the scratch memory


def mixed(n: int, context: int = 0) -> list:
    """Batches of 1 to 31 tokens, half of them of one; every one another text."""
    return [decode(1 if i % 2 else 1 + (7 * i) % 31, context=context, seed=100 + i) for i in range(n)]


class Learning:
    """Runs moe-probe with a budget for some of a model's experts and a cache that learns."""

    def __init__(self, hot: Hot):
        self.hot = hot
        self.whole: dict[tuple, int] = {}

    def whole_mib(self, model: Path, profile: Path, **options) -> int:
        """What all experts and the scratch memory take."""
        key = (model, repr(sorted(options.items())))
        if key not in self.whole:
            steps = [decode(1, seed=seed) for seed in range(CALLS_BEFORE_FILL + 1)]
            everything = self.hot.run(model, steps, profile, experts_per_layer(profile), **options)
            self.whole[key] = everything.start.mib
        return self.whole[key]

    def run(self, model: Path, steps: list, profile: Path, rule: str, fake: dict | None = None, **options) -> HotResult:
        budget = ceil(SHARE * self.whole_mib(model, profile, **options))
        environment = {MAX_MIB: budget, MISS: rule, FREE_COPIES: 1} | AS_IT_PAYS
        return self.hot.run(model, steps, profile, fake=fake, environment=environment, **options)


def assert_swapped(result: HotResult) -> None:
    """The cache has served, and more has been copied than the device's memory ever held."""
    assert result.complaints == []
    assert result.hits > 0
    assert 4 <= result.start.slots < result.start.n_expert
    assert result.end.copied_mib > result.start.mib
    assert result.stats["allocated_bytes"] == 0
