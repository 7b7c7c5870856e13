"""Runs with a hot cache, and reads what the plugin says about it.

`MOE_HOT_TEST_SLOTS` fixes the slots per layer and fills them before the next batch, once a layer has been computed
three times; without it a thread fills them while decoding goes on.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fake import FAKE_DEVICE, fake_environment, read_stats
from paths import PLUGIN
from probe import Probe, Result

CALLS_BEFORE_FILL = 3
START = re.compile(
    r"hot cache on (?P<device>\S+): (?P<mib>\d+) MiB, (?P<slots>\d+) slots per layer \((?P<n_expert>\d+) experts\) "
    r"in (?P<layers>\d+) layers; (?:the profile expects (?P<expected>[\d.]+) % hits)?"
)
END = re.compile(
    r"hot cache: (?P<hits>\d+) hits, (?P<misses>\d+) misses, hit rate [\d.]+ %; "
    r"(?P<copied>[\d.]+) MiB copied, (?P<graphs>\d+) graphs made"
)


@dataclass(frozen=True)
class Start:
    """What was allocated; one per model, when its cache is filled."""

    device: str
    mib: int  # rounded up
    slots: int  # in every layer
    n_expert: int
    layers: int
    expected: float | None  # hits in percent


@dataclass(frozen=True)
class End:
    """What a model's cache has done; said with the last context."""

    hits: int
    misses: int
    copied_mib: float
    graphs: int  # made in the whole process

    @property
    def hit_rate(self) -> float:
        return 100 * self.hits / (self.hits + self.misses)


def plugin_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "moe-hot: " in line]


def starts(log: str) -> list[Start]:
    found = [match.groupdict() for match in map(START.search, plugin_lines(log)) if match]
    return [
        Start(
            device=line["device"],
            mib=int(line["mib"]),
            slots=int(line["slots"]),
            n_expert=int(line["n_expert"]),
            layers=int(line["layers"]),
            expected=line["expected"] and float(line["expected"]),
        )
        for line in found
    ]


def ends(log: str) -> list[End]:
    found = [match.groupdict() for match in map(END.search, plugin_lines(log)) if match]
    return [
        End(int(line["hits"]), int(line["misses"]), float(line["copied"]), int(line["graphs"])) for line in found
    ]


def complaints(log: str) -> list[str]:
    """Every line of the plugin's that is not expected of a cache that works, or of a recording."""
    expected = (START, END, re.compile("recording expert usage"), re.compile(r"recorded \d+ "))
    return [line for line in plugin_lines(log) if not any(pattern.search(line) for pattern in expected)]


@dataclass
class HotResult(Result):
    """A run of moe-probe with a cache."""

    stats_file: Path | None = None

    @property
    def starts(self) -> list[Start]:
        return starts(self.log)

    @property
    def start(self) -> Start:
        (start,) = self.starts
        return start

    @property
    def end(self) -> End:
        (end,) = ends(self.log)
        return end

    @property
    def hits(self) -> int:
        return self.end.hits

    @property
    def complaints(self) -> list[str]:
        return complaints(self.log)

    @property
    def stats(self) -> dict[str, int]:
        """What FakeDevice counted until the process ended."""
        return read_stats(self.stats_file)


class Hot:
    """Runs moe-probe with a cache. Profiles are recorded once for each model and its options."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.profiles: dict[tuple, Path] = {}

    def profile(self, model: Path, steps: list, **options) -> Path:
        """Recorded from these steps when first asked for, with these options (an adapter, say)."""
        key = (model, repr(steps), repr(sorted(options.items())))
        if key not in self.profiles:
            self.profiles[key] = self.probe.recording(model, steps, **options).out_file
        return self.profiles[key]

    def run(
        self,
        model: Path,
        steps: list,
        profile: Path,
        slots: int | None = None,
        cache_device: str | None = None,
        fake: dict | None = None,
        environment: dict | None = None,
        **options,
    ) -> HotResult:
        """`slots`: of every layer, else as many as the budget holds; `fake`: settings of FakeDevice's; `environment`:
        more of the plugin's variables (without an update rate the set of residents is fixed); `options`: moe-probe's."""
        stats_file = self.probe.folder / f"stats-{self.probe.n_runs}"
        ours = {"LLAMA_ARG_MOE_HOT_CACHE": profile, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0, **(environment or {})}
        if slots is not None:
            ours["MOE_HOT_TEST_SLOTS"] = slots
        if cache_device is not None:
            ours["LLAMA_ARG_MOE_HOT_CACHE_DEVICE"] = cache_device
        variables = fake_environment(plugin=PLUGIN, stats=stats_file, **(fake or {}), **ours)
        result = self.probe.faking(model, steps, variables, **options)
        assert FAKE_DEVICE in result.devices
        return HotResult(**vars(result), stats_file=stats_file)


def experts_per_layer(profile: Path) -> int:
    """Whatever has been learnt into it since."""
    return json.loads(profile.read_text())["n_expert"]
