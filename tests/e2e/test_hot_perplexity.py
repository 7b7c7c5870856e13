"""llama-perplexity of the shipped model with hot experts: stock's value, and hits as often as the profile predicts.

Batches of 16 tokens, so that every one is the plugin's. Hits are read from the profile of the run: at its exit
llama.cpp may lose the last lines that its log thread holds, and with them the plugin's last line."""

import paths
from conftest import shipped_model
from experts_json import Profile
from fake import fake_environment
from hot import experts_per_layer, starts
from processes import run, stock_environment
from test_programs import printed_perplexity

SCORE = ["-c", 128, "-b", 16, "-ub", 16, "-t", 2, "--no-repack", "-ngl", 0]
N_CHUNKS, LEAST_CHUNKS = 12, 6
LARGEST_DIFFERENCE = 0.0005
LARGEST_MISPREDICTION = 2.0  # points
BLOCK = 1000  # characters
TEXTS = [paths.REPOSITORY / f"tests/models/text/{kind}.txt" for kind in ("prose", "code", "manual")]
STOCK = [paths.STOCK_BIN / "llama-perplexity"]
LAUNCHED = [paths.LAUNCHER, "llama-perplexity"]


def halves() -> tuple[str, str]:
    """Every other block of each text, and the rest."""
    blocks = [text[start : start + BLOCK] for text in map(read, TEXTS) for start in range(0, len(text), BLOCK)]
    return "".join(blocks[::2]), "".join(blocks[1::2])


def read(path) -> str:
    return path.read_text()


def score(command: list, text: str, tmp_path, name: str, *arguments, environment: dict | None = None) -> str:
    """What the program printed; its log is in `name`.log."""
    file = tmp_path / "text"
    file.write_text(text)
    model = shipped_model()
    command = [*command, "-m", model, "-f", file, *SCORE, *arguments]
    return run(command, tmp_path / f"{name}.log", environment or stock_environment())


def test_the_perplexity_is_stocks(tmp_path, rpc_endpoint):
    """Here even the logits are, since the RPC server's device is a CPU too."""
    text = "".join(read(path)[:4000] for path in TEXTS)
    logits = {name: tmp_path / f"{name}.logits" for name in ("stock", "ours")}
    profile, hits = tmp_path / "experts.json", tmp_path / "hits.json"
    chunks = ["--chunks", N_CHUNKS]
    stock = score(STOCK, text, tmp_path, "stock", *chunks, "--save-all-logits", logits["stock"])
    score(LAUNCHED, text, tmp_path, "recording", *chunks, "--moe-layer-perf-out", profile)
    cache = ["--rpc", rpc_endpoint, "--moe-hot-cache", profile, "--moe-hot-cache-device", "RPC0"]
    half = ["--moe-hot-cache-max-mib", 8, "--moe-layer-perf-out", hits]
    ours = score(LAUNCHED, text, tmp_path, "ours", *chunks, *cache, *half, "--save-all-logits", logits["ours"])
    both = [(float(a), float(b)) for a, b in zip(printed_perplexity(stock), printed_perplexity(ours))]
    assert len(both) >= LEAST_CHUNKS
    assert all(abs(b / a - 1) < LARGEST_DIFFERENCE for a, b in both)
    assert logits["stock"].read_bytes() == logits["ours"].read_bytes()
    assert Profile.read(hits, cached=True).hits > 0


def test_the_hit_rate_on_other_text_is_the_predicted_one(tmp_path):
    """Where both halves come from the same documents, and are long enough: with a quarter of this text the prediction
    is too high by more than the bar, since the hottest experts of a short text are hot by chance too."""
    recorded_text, other_text = halves()
    profile, hits = tmp_path / "experts.json", tmp_path / "hits.json"
    score(LAUNCHED, recorded_text, tmp_path, "recording", "--moe-layer-perf-out", profile)
    environment = fake_environment(
        plugin=paths.PLUGIN,
        LLAMA_ARG_MOE_HOT_CACHE=profile,
        LLAMA_ARG_MOE_LAYER_PERF_OUT=hits,
        MOE_HOT_TEST_SLOTS=experts_per_layer(profile) // 2,
    )
    score(STOCK, other_text, tmp_path, "ours", "--cpu-moe", environment=environment)
    (start,) = starts((tmp_path / "ours.log").read_text())
    measured = Profile.read(hits, cached=True)
    rate = 100 * measured.hits / sum(measured.n_requests.values())
    print(f"predicted {start.expected} %, measured {rate:.1f} %")
    assert abs(rate - start.expected) < LARGEST_MISPREDICTION
