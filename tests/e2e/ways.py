"""Runs a program of llama.cpp by some way of placing and loading experts, as stock and with the plugin, and compares.

A `Way` is what a user would type. The plugin comes in through the launcher, or through the environment where the
launcher would change the way (it adds `--cpu-moe` where the user has not said where experts go).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import paths
from experts_json import Profile
from models import generated
from processes import run, stock_environment
from results import record_result

SHAPE, TYPE = "qwen3moe", "Q4_K"
N_LAYERS = 3
RPC_NAME = "dense on RPC"

COMPLETION, PERPLEXITY = "llama-completion", "llama-perplexity"
N_PREDICTED = 100
PROMPT, N_PROMPT = "Once upon a time", 15  # " t" is one token, every other byte is one
GENERATE = ["-no-cnv", "--temp", 0, "-n", N_PREDICTED, "-p", PROMPT, "--no-warmup"]
LEAST_TEXT = 60  # bytes
TEXT = "What a layer asks for differs by kind of text: prose, programs, pages of a manual. " * 4
N_BATCH = 16
SCORE = ["-c", 64, "-b", N_BATCH, "-ub", N_BATCH]
N_ROWS = N_PROMPT + N_PREDICTED - 1  # that a layer sees: the last token predicted is never fed back
N_ROWS_OF_LAST_LAYER = N_PREDICTED  # as a rule only one of the prompt
ALWAYS = ["-t", 2, "-lv", 4]  # 4 shows the buffers and whatever the plugin says


@dataclass(frozen=True)
class Way:
    """How the experts come to the plugin."""

    name: str  # in the words of docs/models.md
    arguments: tuple = ()
    stock_arguments: tuple | None = None  # where stock wants other words for the same
    through_launcher: bool = True
    layers: tuple = tuple(range(N_LAYERS))  # whose experts the plugin gets
    environment: dict = field(default_factory=dict)


@dataclass
class Run:
    """What one way of running left."""

    text: str
    log: str
    log_probabilities: bytes  # llama-perplexity's, of every token
    profiles: list[Path] = field(default_factory=list)  # of the text, of the perplexity

    @property
    def buffers(self) -> dict[str, float]:
        """MiB of weights in each buffer type."""
        return model_buffers(self.log)


def model_buffers(log: str) -> dict[str, float]:
    found = re.findall(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB", log)
    sizes = dict.fromkeys((name for name, _ in found), 0.0)
    for name, size in found:
        sizes[name] += float(size)
    return sizes


def plugin_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "moe-hot:" in line]


def plugin_environment(out_file: Path | None = None, **extra: str) -> dict[str, str]:
    """The plugin without the launcher; without a file it has no reason to take anything."""
    record = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": str(out_file)} if out_file else {}
    return stock_environment(GGML_BACKEND_PATH=str(paths.PLUGIN), **record, **extra)


class Programs:
    """Runs llama-completion and llama-perplexity on one model; logs and other files go to `folder`."""

    def __init__(self, folder: Path, model: Path, repack: bool = False):
        self.folder = folder
        self.common = ["-m", model, *ALWAYS, *([] if repack else ["--no-repack"])]
        self.text_file = folder / "text"
        self.text_file.write_text(TEXT)

    def stock(self, way: Way) -> Run:
        arguments = way.arguments if way.stock_arguments is None else way.stock_arguments
        return self._both("stock", arguments, lambda _: ([], stock_environment(**way.environment)))

    def inert(self, way: Way) -> Run:
        """The plugin is loaded and nobody asks for anything."""
        return self._both("inert", way.arguments, lambda _: ([], plugin_environment(**way.environment)))

    def recording(self, way: Way, out_file: Path | None = None) -> Run:
        out_file = out_file or self.folder / "experts.json"
        files = {COMPLETION: out_file, PERPLEXITY: out_file.with_name(f"perplexity-{out_file.name}")}

        def how(program: str) -> tuple[list, dict]:
            if way.through_launcher:
                launcher = [paths.LAUNCHER, "--moe-layer-perf-out", files[program]]
                return launcher, stock_environment(**way.environment)
            return [], plugin_environment(files[program], **way.environment)

        result = self._both("recording", way.arguments, how)
        result.profiles = list(files.values())
        return result

    def _both(self, kind: str, arguments: tuple, how) -> Run:
        """`how(program)`: the launcher and its flags, if it is to come in, and the environment."""
        logits = self.folder / f"{kind}.logits"
        score = ["-f", self.text_file, *SCORE, "--save-all-logits", logits]
        text = self._run(kind, COMPLETION, [*arguments, *GENERATE], *how(COMPLETION))
        self._run(kind, PERPLEXITY, [*arguments, *score], *how(PERPLEXITY))
        return Run(text, self.log_of(kind, COMPLETION).read_text(errors="replace"), logits.read_bytes())

    def _run(self, kind: str, program: str, arguments: list, launcher: list, environment: dict) -> str:
        started = [launcher[0], paths.to_launch(program), *launcher[1:]] if launcher else [paths.STOCK_BIN / program]
        return run([*started, *self.common, *arguments], self.log_of(kind, program), environment)

    def log_of(self, kind: str, program: str) -> Path:
        return self.folder / f"{kind}-{program}.log"


def assert_same_text(stock: str, ours: str, least: int = LEAST_TEXT) -> None:
    """Equal as far as both go: at its exit, llama.cpp may lose the last lines that its log thread holds."""
    length = min(len(stock), len(ours))
    assert length >= least
    assert ours[:length] == stock[:length]


def assert_same_answer(stock: Run, ours: Run) -> None:
    assert_same_text(stock.text, ours.text)
    assert len(stock.log_probabilities) > len(TEXT)
    assert ours.log_probabilities == stock.log_probabilities


def assert_computed(run: Run, layers: tuple, n_rows_of_last: int = N_ROWS_OF_LAST_LAYER) -> None:
    """Exactly these layers, in both programs; of the text, which starts with a small batch, every token once."""
    text, perplexity = map(Profile.read, run.profiles)
    assert text.layers == perplexity.layers == list(layers)
    assert text.n_rows == expected_rows(layers, n_rows_of_last)
    assert all(n > 0 for n in perplexity.n_rows.values())


def expected_rows(layers: tuple, n_rows_of_last: int = N_ROWS_OF_LAST_LAYER) -> dict[int, int]:
    return {layer: n_rows_of_last if layer == N_LAYERS - 1 else N_ROWS for layer in layers}


def assert_equal(
    programs: Programs,
    way: Way,
    shape: str = SHAPE,
    type_name: str = TYPE,
    n_rows_of_last: int = N_ROWS_OF_LAST_LAYER,
) -> Run:
    """The same answer as stock, computed by the plugin in exactly the layers that the way leaves to the CPU."""
    stock, ours = programs.stock(way), programs.recording(way)
    assert "MoEHot" not in stock.log
    assert_same_answer(stock, ours)
    assert_computed(ours, way.layers, n_rows_of_last)
    record_result(shape, type_name, way.name, "equal")
    return ours


def small_model() -> Path:
    return generated(TYPE)


def thread_names(pid: int) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
