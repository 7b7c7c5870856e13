"""The patched programs have all our flags natively, do with them what the launcher does, and are stock without them."""

import json
import re
from pathlib import Path

import pytest

import paths
from conftest import shipped_model
from experts_json import Profile
from fake import FAKE_DEVICE, fake_environment
from hot import ends
from patched import COMPLETION, HEADING, PROGRAMS, needs_build, patched, run
from patched_server import complete
from processes import stock_environment
from server import start

CACHE, OUT = "--moe-hot-cache", "--moe-layer-perf-out"
MOST_CHANGED_LINES, MOST_FILES = 80, 7
TABLE = paths.REPOSITORY / "ggml-hooks/glue/options.inc"
FLAGS = re.findall(r'MOE_HOT_OPTION\("(--[a-z-]+)", "(LLAMA_ARG_\w+)"', TABLE.read_text())
SLOTS = 10  # per layer of 32 experts


def test_the_patches_are_small():
    changed, files = 0, set()
    for patch in (paths.REPOSITORY / "ggml-hooks/patches").glob("*.patch"):
        for line in patch.read_text().splitlines():
            if line.startswith("+++ "):
                files.add(line.split()[1])
            elif line.startswith(("+", "-")) and not line.startswith("--- "):
                changed += 1
    assert 0 < changed <= MOST_CHANGED_LINES and 0 < len(files) <= MOST_FILES, (changed, files)
    readme = (paths.REPOSITORY / "README.md").read_text()
    assert f"{changed} changed lines in {len(files)} files" in readme, "the README prints it"


@pytest.fixture
def profile(recorded) -> Path:
    """Of the shipped model, recorded by a patched program."""
    return recorded


@needs_build
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_our_flags_under_a_heading_of_their_own(program):
    answer = patched(program, "--help")
    before, ours = answer.out.split(HEADING)
    assert answer.code == 0
    for flag, variable in FLAGS:
        assert f"{flag} " in ours and variable in ours and flag not in before
    assert patched(program, "--help").out.count(HEADING) == 1


# flag and value, and what the one line says. {} is the test's folder.
BAD = [
    (["--moe-hot-cache-max-mib", "-2"], "expected a whole number of MiB"),
    (["--moe-hot-cache-max-mib", "much"], '--moe-hot-cache-max-mib: "much"'),
    (["--moe-hot-cache-auto-reserve-mib", "-1"], "from 0 to"),
    (["--moe-hot-cache-update-rate", "2"], "expected a number from 0 to 1"),
    (["--moe-hot-cache-miss", "gpu"], "expected cpu, copy or auto"),
    (["--moe-hot-cache-max-mib", "7"], "does nothing without a profile"),
    (["--moe-hot-cache", "{}/none.json"], "no such file"),
    (["--moe-hot-cache", "{}/not-json.json"], "not-json.json"),
    (["--moe-layer-perf-out", "{}/no/e.json"], "expected an existing folder"),
    (["--moe-layer-perf-out", ""], "expected FILE"),
    (["--moe-trace-out", "{}"], "expected a new file or an earlier trace"),
]


@needs_build
@pytest.mark.parametrize(
    ("words", "n_cpu_moe"),
    [
        ([], 999),
        (["-ncmoe", 0], 999),
        (["-ncmoe", 1], 1),
        (["-ot", "token_embd=CPU"], 999),
        (["-ot", "ffn_up_exps=CPU"], 0),
    ],
)
def test_llama_bench_places_experts_unless_the_user_has(words, n_cpu_moe, tmp_path):
    test = ["-t", 1, "-p", 0, "-n", 1, "-r", 1, "--no-warmup", "-o", "json"]
    answer = patched("llama-bench", "-m", shipped_model(), *test, *words, OUT, tmp_path / "experts.json")
    assert answer.code == 0, answer.err
    assert [row["n_cpu_moe"] for row in json.loads(answer.out)] == [n_cpu_moe]


@needs_build
@pytest.mark.parametrize("program", PROGRAMS)
def test_bad_values_end_with_2_and_one_line(program, tmp_path):
    (tmp_path / "not-json.json").write_text("{")
    for words, said in BAD:
        answer = patched(program, "-m", shipped_model(), *(word.format(tmp_path) for word in words))
        assert answer.code == 2 and said in answer.complaint, (words, answer)
        assert words[0] in answer.complaint


@needs_build
def test_a_bad_variable_or_device_is_named(profile):
    answer = patched("llama-completion", "-m", shipped_model(), *COMPLETION, LLAMA_ARG_MOE_HOT_CACHE_MISS="gpu")
    assert answer.code == 2 and 'LLAMA_ARG_MOE_HOT_CACHE_MISS is "gpu"' in answer.complaint
    answer = patched("llama-completion", "-m", shipped_model(), *COMPLETION, CACHE, profile, f"{CACHE}-device", "GPU9")
    assert answer.code == 2 and '"GPU9"' in answer.complaint and "expected one of" in answer.complaint


def on_fake(**settings) -> dict[str, str]:
    """FakeDevice, with a cache of a fixed size that is filled before the fourth batch."""
    return fake_environment(MOE_HOT_TEST_SLOTS=str(SLOTS), **settings)


SERVER = ["-m", paths.SHIPPED_MODEL, "-ngl", 99, "-t", 1, "-c", 512, "-np", 1, "--no-warmup", "--no-repack"]


def text_and_ends(folder: Path, program: Path, arguments: list, environment: dict[str, str]) -> tuple[str, list]:
    """What a server answers, and what it says of its cache at the end."""
    name = f"{program.parent.parent.name}-server"
    with start([program, *SERVER, *arguments], folder, name, environment) as server:
        text = complete(server, 40)["content"]
        server.stop()
    return text, ends(server.log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def stock_text(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    text, _ = text_and_ends(folder, paths.STOCK_BIN / "llama-server", ["--cpu-moe"], fake_environment())
    assert text
    return text


@needs_build
def test_patched_is_what_stock_and_the_launcher_are(tmp_path, profile, stock_text):
    ours = text_and_ends(tmp_path, paths.PATCHED_BIN / "llama-server", [CACHE, profile], on_fake())
    # FakeDevice loads the plugin, since llama.cpp loads one backend only; the launcher would refuse another backend.
    launched = on_fake(plugin=paths.PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=str(profile))
    theirs = text_and_ends(tmp_path, paths.STOCK_BIN / "llama-server", ["--cpu-moe"], launched)
    assert ours == theirs
    assert ours[0] == stock_text and ours[1][0].hits > 0


@needs_build
def test_through_the_launcher_nothing_is_done_twice(profile, tmp_path):
    arguments = ["-m", shipped_model(), *COMPLETION, "-n", 20]
    out_file = tmp_path / "again.json"
    launched = run([paths.LAUNCHER, paths.PATCHED_BIN / "llama-completion", *arguments, OUT, out_file])
    direct = patched("llama-completion", *arguments, OUT, tmp_path / "direct.json")
    assert launched.code == direct.code == 0, launched.err
    assert Profile.read(out_file).raw["layers"] == Profile.read(tmp_path / "direct.json").raw["layers"]


@needs_build
def test_llama_cli_has_them_too(tmp_path, profile):
    out_file = tmp_path / "cli.json"
    arguments = ["-m", shipped_model(), "-p", "The house", "-n", 20, "-st", "-t", 1, "-c", 512, "-ngl", 99, "--temp", 0]
    cache = [CACHE, profile, OUT, out_file]
    answer = run([paths.PATCHED_BIN / "llama-cli", *arguments, *cache], on_fake())
    assert answer.code == 0, answer.err
    layers = Profile.read(out_file, cached=True).raw["layers"]
    assert sum(layer["hot_slots_total"] for layer in layers) > 0


@needs_build
def test_flags_win_over_the_environment_and_that_over_a_configuration_file(tmp_path):
    config = tmp_path / "config/llama.cpp"
    config.mkdir(parents=True)
    files = {name: tmp_path / f"{name}.json" for name in ("file", "variable", "flag")}
    (config / "config.ini").write_text(f"moe-layer-perf-out = {files['file']}\n")
    environment, arguments = {"XDG_CONFIG_HOME": str(tmp_path / "config")}, []
    for name in files:
        if name == "variable":
            environment["LLAMA_ARG_MOE_LAYER_PERF_OUT"] = str(files[name])
        if name == "flag":
            arguments = [OUT, files[name]]
        answer = patched("llama-completion", "-m", shipped_model(), *COMPLETION, "-n", 5, *arguments, **environment)
        assert answer.code == 0, answer.err
        assert sorted(tmp_path.glob("*.json")) == [files[name]], name
        assert Profile.read(files[name]).raw["layers"]
        files[name].unlink()


# What stands beside the cache on the command line; with llama.cpp's own answer to compare.
BESIDE = {
    "--cpu-moe": ["--cpu-moe"],
    "--n-cpu-moe": ["--n-cpu-moe", 3],
    "-ot": ["-ot", "blk\\.[012]\\..*_exps=CPU"],
    "-ot, our device by name": ["-ot", "_exps=MoEHot"],
    "--fit on": ["--fit", "on"],
    "--fit off": ["--fit", "off"],
    "--fit-target": ["--fit-target", 5],
    "-ts": ["-ts", "1"],
    "-sm none": ["-sm", "none"],
    "-sm layer": ["-sm", "layer"],
    "--load-mode mlock": ["--load-mode", "mlock"],
    "--load-mode none": ["--load-mode", "none"],
    "--no-host": ["--no-host"],
}


@needs_build
@pytest.mark.parametrize("name", BESIDE)
def test_a_cache_works_beside_other_flags(name, tmp_path, profile, stock_text):
    arguments = [*BESIDE[name], CACHE, profile]
    text, (end,) = text_and_ends(tmp_path, paths.PATCHED_BIN / "llama-server", arguments, on_fake())
    assert text == stock_text
    assert end.hits > 0


@needs_build
def test_a_fit_leaves_room_for_the_cache(profile):
    """As much as the launcher: what it would give to --fit-target is what the plugin answers, see src/cli/native.rs."""
    arguments = ["-m", shipped_model(), *COMPLETION, "-n", 1, "-v", CACHE, profile, f"{CACHE}-max-mib", 7]
    answer = run([paths.PATCHED_BIN / "llama-completion", *arguments], on_fake())
    assert answer.code == 0
    assert re.search(r"will leave \d+ >= 1031 MiB of free device memory", answer.err), "1024 and 7"


@needs_build
def test_without_our_flags_other_programs_print_what_stock_does():
    def said(program: str, *more) -> list[str]:
        folders = (paths.STOCK_BIN, paths.PATCHED_BIN)
        answers = [run([folder / program, "-m", shipped_model(), *more], stock_environment()) for folder in folders]
        assert all(answer.code == 0 for answer in answers), answers
        return [answer.out for answer in answers]

    stock, ours = said("llama-completion", *COMPLETION, "-n", 20)
    # llama.cpp may end before its last words are printed.
    shorter, longer = sorted((stock, ours), key=len)
    assert longer.startswith(shorter.rstrip()) and len(shorter) > len("The house")
    if (paths.STOCK_BIN / "llama-bench").exists():  # not built of every llama.cpp
        stock, ours = map(json.loads, said("llama-bench", "-t", 1, "-p", 0, "-n", 4, "-r", 1, "-o", "json"))
        assert stock[0].keys() == ours[0].keys() - {"moe_hot_cache", "moe_hot_hit_rate"}


@needs_build
def test_without_our_flags_a_program_is_stock_and_loads_nothing(tmp_path):
    arguments = ["-m", shipped_model(), "-t", 1, "-c", 512, "-np", 1, "--no-warmup"]
    body = {"prompt": "The house", "n_predict": 40, "n_probs": 4, "temperature": 0, "ignore_eos": True}
    answers = []
    for folder in (paths.STOCK_BIN, paths.PATCHED_BIN):
        name = f"server-{len(answers)}"
        with start([folder / "llama-server", *arguments], tmp_path, name, stock_environment()) as server:
            answer = server.http.post(f"{server.url}/completion", json=body).json()
            answers.append((answer["content"], answer["completion_probabilities"]))
            assert "moe_hot" not in answer["timings"]
            assert "moe_hot" not in Path(f"/proc/{server.child.pid}/maps").read_text()
            if folder == paths.PATCHED_BIN:
                refused = server.http.get(f"{server.url}/moe-layer-perf")
                assert refused.status_code == 501 and refused.json()["error"]["type"] == "not_supported_error"
            server.stop()
    assert answers[0] == answers[1]


@needs_build
@pytest.mark.parametrize("program", ["llama-completion", "llama-bench"])
def test_the_help_is_stocks_but_for_our_section(program):
    ours, stock = (run([folder / program, "--help"]).out for folder in (paths.PATCHED_BIN, paths.STOCK_BIN))
    kept = [line for line in ours.split(HEADING)[0].splitlines() if line.strip()]
    theirs = [line.replace(str(paths.STOCK_BIN), str(paths.PATCHED_BIN)) for line in stock.splitlines() if line.strip()]
    assert set(kept) <= set(theirs)


BENCH = ["-p", 0, "-n", 16, "-t", 1, "-r", 2, "-ngl", 99, "-o", "json", "--repack", 0]


@needs_build
def test_llama_bench_says_whether_a_cache_was_on_and_its_hit_rate(profile):
    stock = patched("llama-bench", "-m", shipped_model(), *BENCH[:-4], "-o", "json")
    assert "moe_hot_cache" not in json.loads(stock.out)[0]
    with_cache = [paths.PATCHED_BIN / "llama-bench", "-m", shipped_model(), *BENCH, CACHE, profile]
    answer = run(with_cache, on_fake())
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)
    assert row["moe_hot_cache"] == FAKE_DEVICE and 0.0 < row["moe_hot_hit_rate"] <= 1.0
    said = re.search(r"moe-hot: hot cache on FAKE0: (\d+) of (\d+) requests hit", answer.err)
    assert row["moe_hot_hit_rate"] == pytest.approx(int(said[1]) / int(said[2]), abs=1e-6)
    off = run([*with_cache, f"{CACHE}-max-mib", 0], on_fake())
    assert json.loads(off.out)[0]["moe_hot_cache"] == "off" and "moe-hot: no hot cache: " in off.err
