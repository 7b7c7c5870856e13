"""Runs moe-probe on a scenario, with or without the plugin, and compares two runs bit for bit."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experts_json import Profile
from paths import PLUGIN, PROBE
from processes import run, stock_environment
from splits import DEBUG_ENVIRONMENT, Split, graphs

DEVICE = "MoEHot"
RANDOM_SEED = 7
LEAST_SPREAD = 0.1  # of logits; those of generated models have about 1.8
N_TOKENS_IN_ALL_MODELS = 256  # every test vocabulary has at least the 256 byte tokens


@dataclass
class Result:
    """What one run of moe-probe left."""

    batches: list = field(repr=False)  # {"n_tokens", "next", "microseconds"} per decoded batch
    logits: bytes = field(repr=False)  # f32, [n_outputs, n_vocab]
    devices: list
    expert_counts: dict = field(repr=False)  # {layer: {batch class: {"calls", "experts"}}}, when asked for
    log: str = field(repr=False)
    folder: Path
    waits: list = field(repr=False, default_factory=list)  # {"waits", "blocking_copies"} so far, for each step `note_waits`
    out_file: Path | None = None  # where the plugin was asked to record

    @property
    def profile(self) -> Profile:
        return Profile.read(self.out_file)

    @property
    def tokens(self) -> list:
        return [batch["next"] for batch in self.batches]


def tokens(n: int, seed: int = RANDOM_SEED) -> list[int]:
    return np.random.default_rng(seed).integers(0, N_TOKENS_IN_ALL_MODELS, n).tolist()


def decode(n_tokens: int | dict[int, int], outputs: str = "all", context: int = 0, seed: int = RANDOM_SEED) -> dict:
    """A step that decodes n random tokens on sequence 0, or {sequence: n} on several, as one batch."""
    lengths = n_tokens if isinstance(n_tokens, dict) else {0: n_tokens}
    sequences = [{"id": id, "tokens": tokens(n, seed + 100 * id + n)} for id, n in lengths.items()]
    return {"op": "decode", "context": context, "sequences": sequences, "outputs": outputs}


def greedy(n: int, sequences: tuple = (0,), context: int = 0) -> dict:
    return {"op": "greedy", "context": context, "sequences": list(sequences), "n": n}


def threads(*steps: list) -> dict:
    return {"op": "threads", "threads": list(steps)}


def unload(model: int = 0) -> dict:
    return {"op": "unload", "model": model}


def load(model: int = 0) -> dict:
    return {"op": "load", "model": model}


def note_waits() -> dict:
    return {"op": "note_waits"}


def setting(name: str, value: int) -> dict:
    """Changes a setting of FakeDevice's; without that device nothing."""
    return {"op": "set", "name": name, "value": value}


def until(counter: str, least: int) -> dict:
    """Waits until FakeDevice has counted so much; not at all without that device."""
    return {"op": "until", "counter": counter, "least": least}


def differ(a: Result, b: Result) -> bool:
    return a.logits != b.logits


class Probe:
    """Runs moe-probe in folders of its own below `folder`. Stock runs are remembered: many tests want the same one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.n_runs = 0
        self.stock_results: dict[str, Result] = {}

    def stock(self, model: Path, steps: list, **options) -> Result:
        key = json.dumps({"model": str(model), "steps": steps, **options}, sort_keys=True)
        if key not in self.stock_results:
            self.stock_results[key] = self.stock_again(model, steps, **options)
        return self.stock_results[key]

    def stock_again(self, model: Path, steps: list, **options) -> Result:
        result = self._run({"model": str(model), "steps": steps, **options}, stock_environment())
        assert DEVICE not in result.devices
        return result

    def recording(self, model: Path, steps: list, out_file: Path | None = None, **options) -> Result:
        """With the plugin, which records its routing and so takes the experts."""
        out_file = out_file or self.folder / f"experts-{self.n_runs}.json"
        environment = stock_environment(GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file))
        result = self._run({"model": str(model), "steps": steps, **options}, environment)
        assert DEVICE in result.devices
        result.out_file = out_file
        return result

    def graphs(self, model: Path, steps: list, **options) -> list[list[Split]]:
        """How the scheduler cut every graph, with the plugin recording; those of the steps come last."""
        environment = stock_environment(
            GGML_BACKEND_PATH=str(PLUGIN),
            LLAMA_ARG_MOE_LAYER_PERF_OUT=str(self.folder / f"experts-{self.n_runs}.json"),
            **DEBUG_ENVIRONMENT,
        )
        return graphs(self._run({"model": str(model), "steps": steps, **options}, environment).log)

    def inert(self, model: Path, steps: list, **options) -> Result:
        """With the plugin loaded but none of our options."""
        environment = stock_environment(GGML_BACKEND_PATH=str(PLUGIN))
        result = self._run({"model": str(model), "steps": steps, **options}, environment)
        assert DEVICE in result.devices
        return result

    def faking(self, model: Path, steps: list, environment: dict[str, str], **options) -> Result:
        """In an environment of `fake.fake_environment`."""
        return self._run({"model": str(model), "steps": steps, **options}, environment)

    def _run(self, scenario: dict, environment: dict[str, str]) -> Result:
        folder = self.folder / f"run-{self.n_runs}"
        self.n_runs += 1
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(scenario))
        log = folder / "log"
        run([PROBE, folder / "run.json", folder], log, environment)
        result = json.loads((folder / "result.json").read_text())
        logits = (folder / "logits.bin").read_bytes()
        return Result(
            result["batches"],
            logits,
            result["devices"],
            result.get("expert_counts", {}),
            log.read_text(),
            folder,
            result["waits"],
        )


def assert_same_answer(stock: Result, ours: Result) -> None:
    """Token ids and logits, bit for bit."""
    for index, (expected, got) in enumerate(zip(stock.tokens, ours.tokens, strict=True)):
        assert expected == got, f"batch {index} of {stock.batches[index]['n_tokens']} tokens: other tokens"
    if differ(stock, ours):
        expected, got = (np.frombuffer(result.logits, np.float32) for result in (stock, ours))
        assert expected.size == got.size, "another number of logits"
        n_different = np.count_nonzero(expected.view(np.uint32) != got.view(np.uint32))
        largest = np.nanmax(np.abs(expected - got))
        raise AssertionError(f"{n_different} of {expected.size} logits differ, by at most {largest}")


def assert_meaningful(stock: Result) -> None:
    """Equal bits of an answer that is no number, or always the same one, would mean nothing."""
    values = np.frombuffer(stock.logits, np.float32)
    assert np.isfinite(values).all()
    assert values.std() > LEAST_SPREAD


def assert_equal_and_computed(probe: Probe, model: Path, steps: list, **options) -> None:
    """The rule of the whole project: stock's answer, and the plugin did compute it."""
    stock = probe.stock(model, steps, **options)
    ours = probe.recording(model, steps, **options)
    assert ours.profile.layer_calls > 0
    assert_same_answer(stock, ours)
