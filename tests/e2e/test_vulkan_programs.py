"""A cache on a real GPU backend (see test_vulkan.py) in the programs that people use. Several tokens at once, and dense
layers on the device, take kernels that compile for minutes: all of it runs with --full."""

import numpy as np
import pytest

import paths
import vulkan
from conftest import shipped_model
from experts_json import Profile
from hot import complaints, ends, experts_per_layer
from probe import decode, greedy, note_waits
from processes import run
from server import GREEDY, N_SEQUENCES, start
from test_hot_perplexity import SCORE, TEXTS, read
from test_programs import printed_perplexity
from test_vulkan import MOST_ERROR, SINGLE, OnVulkan, assert_served, error, waits_per_layer

PROMPTS = ["Once upon a time", "def parse(text):", "The command", "She said that"]
# Of the logarithm of a token's probability.
MOST_APART = 0.1
# Of perplexity, against stock's with all experts in main memory.
MOST_PERPLEXITY = 0.01
DENSE_ON_DEVICE = {"device": vulkan.DEVICE, "n_gpu_layers": 99}
pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _require_vulkan():
    vulkan.require()


@pytest.fixture
def on_vulkan(hot) -> OnVulkan:
    return OnVulkan(hot)


def environment(**more) -> dict[str, str]:
    return vulkan.vulkan_environment(MOE_HOT_TEST_NO_GUARD=1, MOE_HOT_TEST_WAIT=1, **more)


def serve(folder, name: str, *arguments, profile=None, parallel: int = N_SEQUENCES):
    """llama-server with dense layers on the CPU; with a cache of all experts if there is a profile."""
    program = [vulkan.BIN / "llama-server"]
    if profile:
        cache = ["--moe-hot-cache", profile, "--moe-hot-cache-device", vulkan.DEVICE, "--moe-hot-cache-update-rate", 0]
        program = [paths.LAUNCHER, *program, *cache, "--moe-hot-cache-max-mib", 64]
    common = ["-m", shipped_model(), "--no-repack", "--no-warmup", "-t", 1, "-ngl", 0, "--cpu-moe", "-c", 4096, "-np", parallel]
    return start([*program, *common, *arguments], folder, name, environment())


def first_token(answer: dict) -> dict[str, float]:
    """Logarithms of probabilities of the likeliest tokens."""
    return {token["token"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}


def together(server, prompts: list[str], n_predict: int) -> list[dict]:
    """One request of four clients' prompts, whose sequences share batches."""
    body = {"prompt": prompts, "n_predict": n_predict, "n_probs": 4, **GREEDY}
    answers = server._post("/completion", body).json()
    return [answers] if len(prompts) == 1 else sorted(answers, key=lambda answer: answer["index"])


def assert_close(stock: list[dict], ours: list[dict]) -> None:
    for expected, got in zip(map(first_token, stock), map(first_token, ours), strict=True):
        best = max(expected, key=expected.get)
        assert best in got and abs(got[best] - expected[best]) < MOST_APART, (expected, got)


def assert_hits(log: str) -> None:
    assert complaints(log) == []
    assert max(end.hits for end in ends(log)) > 0


def warmed_up(server) -> None:
    """The cache is filled after a few tokens, and these are computed with it."""
    server.complete("Once upon a", 100)


def test_four_clients(hot, tmp_path):
    profile = hot.profile(shipped_model(), SINGLE)
    with serve(tmp_path, "stock") as server:
        stock = together(server, PROMPTS, 24)
    with serve(tmp_path, "ours", profile=profile) as server:
        warmed_up(server)
        ours = together(server, PROMPTS, 24)
        server.stop()
    assert_close(stock, ours)
    assert_hits(server.log.read_text())


def test_a_draft_model(hot, tmp_path):
    """The same model, so that its drafts are taken: batches of up to five tokens."""
    draft = ["-md", shipped_model(), "-ngld", 0, "--spec-draft-cpu-moe", "--spec-type", "draft-simple", "--spec-draft-n-max", 4]
    with serve(tmp_path, "stock", *draft, parallel=1) as server:
        stock = together(server, PROMPTS[:1], 24)
    with serve(tmp_path, "ours", *draft, profile=hot.profile(shipped_model(), SINGLE), parallel=1) as server:
        warmed_up(server)
        ours = together(server, PROMPTS[:1], 24)
        server.stop()
    assert_close(stock, ours)
    assert ours[0]["timings"]["draft_n_accepted"] > 0
    assert_hits(server.log.read_text())


def test_a_sequence_that_is_saved_and_restored_goes_on_as_it_would_have(hot, tmp_path):
    profile = hot.profile(shipped_model(), SINGLE)
    body = {"prompt": PROMPTS[0], "n_predict": 16, **GREEDY, "cache_prompt": True, "id_slot": 0}
    with serve(tmp_path, "ours", "--slot-save-path", f"{tmp_path}/", profile=profile, parallel=1) as server:
        warmed_up(server)
        first = server._post("/completion", body).json()["content"]
        longer = body | {"prompt": PROMPTS[0] + first}
        server._post("/slots/0?action=save", {"filename": "saved"})
        went_on = server._post("/completion", longer).json()["content"]
        server.complete("Something else altogether", 8)
        server._post("/slots/0?action=restore", {"filename": "saved"})
        again = server._post("/completion", longer).json()["content"]
        server.stop()
    assert again == went_on
    assert_hits(server.log.read_text())


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_perplexity_is_stocks(hot, tmp_path, share):
    """Batches of 16 tokens, so that every one is the plugin's."""
    model, n_chunks = shipped_model(), 4
    text = tmp_path / "text"
    text.write_text("".join(read(path)[:2000] for path in TEXTS))
    command = [vulkan.BIN / "llama-perplexity", "-m", model, "-f", text, *SCORE, "-t", 1, "--cpu-moe", "--chunks", n_chunks]
    slots = round(share * experts_per_layer(hot.profile(model, SINGLE)))
    cache = {
        "LLAMA_ARG_MOE_HOT_CACHE": hot.profile(model, SINGLE),
        "LLAMA_ARG_MOE_HOT_CACHE_DEVICE": vulkan.DEVICE,
        "LLAMA_ARG_MOE_LAYER_PERF_OUT": tmp_path / "hits.json",
        "MOE_HOT_TEST_SLOTS": slots,
    }
    stock = run(command, tmp_path / "stock.log", vulkan.vulkan_environment())
    ours = run(command, tmp_path / "ours.log", vulkan.vulkan_environment(plugin=paths.PLUGIN, **cache))
    expected, got = (np.array(printed_perplexity(out), float) for out in (stock, ours))
    assert len(expected) == n_chunks
    assert np.abs(got / expected - 1).max() < MOST_PERPLEXITY
    assert Profile.read(tmp_path / "hits.json", cached=True).hits > 0


def test_prompts_of_300_tokens(on_vulkan):
    """Stock's, between tokens that are ours."""
    model = shipped_model()
    steps = [*SINGLE, decode(300), decode(1), greedy(20), decode(300), decode(1)]
    stock, ours = on_vulkan.stock(model, steps, n_ctx=2048), on_vulkan.run(model, steps, 16, n_ctx=2048)
    assert_served(ours)
    assert error(stock, ours) < MOST_ERROR


def test_dense_layers_on_the_device(on_vulkan):
    """Against stock with its dense layers there too."""
    model = shipped_model()
    there = on_vulkan.hot.probe.faking(model, SINGLE, vulkan.vulkan_environment(), n_threads=vulkan.N_THREADS, **DENSE_ON_DEVICE)
    profile = on_vulkan.hot.profile(model, SINGLE)
    ours = on_vulkan.run(model, SINGLE, 16, profile=profile, **DENSE_ON_DEVICE)
    assert_served(ours)
    assert error(there, ours) < MOST_ERROR


def test_with_dense_layers_on_the_device_inputs_are_waited_for_once(on_vulkan):
    """Stock waits for each input and then for its copy; ours asks for all of them and waits once."""
    model = shipped_model()
    steps = [*SINGLE, note_waits(), *SINGLE, note_waits()]
    options = {**DENSE_ON_DEVICE, "count_waits": vulkan.DEVICE, "n_threads": vulkan.N_THREADS}
    recording = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": on_vulkan.hot.probe.folder / "waits.json"}
    n_layers = len(Profile.read(on_vulkan.hot.profile(model, SINGLE)).raw["layers"])
    counts = []
    for variables in (vulkan.vulkan_environment(), vulkan.vulkan_environment(plugin=paths.PLUGIN, **recording)):
        result = on_vulkan.hot.probe.faking(model, steps, variables, **options)
        counts.append(sum(waits_per_layer(result, len(SINGLE), n_layers).values()))
    print(f"waits per layer: {counts[0]} in stock with --cpu-moe, {counts[1]} with the plugin")
    assert counts[0] - counts[1] >= 2, "of stock's four for the inputs"
