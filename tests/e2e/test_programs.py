"""Other programs of llama.cpp through the launcher: they work as ever, and leave a profile when asked to."""

import re

import pytest

import paths
from experts_json import Profile
from models import generated
from processes import run, stock_environment
from ways import assert_same_text

TEXT = (paths.REPOSITORY / "tests/models/text/prose.txt").read_text()[:1800]
GENERATE = ["-no-cnv", "--temp", 0, "-n", 120, "-t", 2, "--no-warmup", "-p", "Once upon a time"]
LEAST_TEXT = 80  # bytes of 120 and more
LEAST_CHUNKS = 4  # of 7


def stock_program(name: str, *arguments, folder, log: str) -> str:
    return run([paths.STOCK_BIN / name, *arguments], folder / log, stock_environment())


def launched(*arguments, folder, log: str) -> str:
    return run([paths.LAUNCHER, *arguments], folder / log, stock_environment())


def assert_recorded(out_file) -> None:
    assert Profile.read(out_file).layer_calls > 0


def as_two_words(out_file) -> list:
    return ["--moe-layer-perf-out", out_file]


def as_one_word(out_file) -> list:
    return [f"--moe-layer-perf-out={out_file}"]


@pytest.mark.parametrize("program", ["llama-completion", paths.STOCK_BIN / "llama-completion"])
@pytest.mark.parametrize("flag", [as_two_words, as_one_word])
def test_llama_completion(model_of_two, tmp_path, program, flag):
    out_file = tmp_path / "experts.json"
    arguments = ["-m", model_of_two, "--no-repack", *GENERATE]
    stock = stock_program("llama-completion", *arguments, folder=tmp_path, log="stock.log")
    ours = launched(program, *flag(out_file), *arguments, folder=tmp_path, log="ours.log")
    assert_same_text(stock, ours, LEAST_TEXT)
    assert_recorded(out_file)


def test_llama_completion_without_our_flags(tmp_path):
    """Stock with repacking, which in this model is another text than without."""
    folder = tmp_path / "launched"
    folder.mkdir()
    arguments = ["-m", generated("Q4_K"), *GENERATE]
    stock = stock_program("llama-completion", *arguments, folder=tmp_path, log="stock.log")
    not_repacked = stock_program("llama-completion", *arguments, "--no-repack", folder=tmp_path, log="plain.log")
    ours = launched("llama-completion", *arguments, folder=folder, log="ours.log")
    assert_same_text(stock, ours, LEAST_TEXT)
    with pytest.raises(AssertionError):
        assert_same_text(not_repacked, ours)
    assert {path.name for path in folder.iterdir()} == {"ours.log", "ours.log.out"}, "a file nobody asked for"


def test_llama_bench(model_of_two, tmp_path):
    out_file = tmp_path / "experts.json"
    arguments = ["-m", model_of_two, "-p", 8, "-n", 8, "-r", 1, "-t", 2, "-o", "jsonl"]
    output = launched("llama-bench", *arguments, *as_two_words(out_file), folder=tmp_path, log="ours.log")
    assert output.count('"avg_ts"') == 2
    assert_recorded(out_file)


def test_llama_perplexity(model_of_two, tmp_path):
    """Chunks of 64 tokens in batches of 16: every one is the plugin's."""
    out_file, text_file = tmp_path / "experts.json", tmp_path / "text"
    text_file.write_text(TEXT)
    arguments = ["-m", model_of_two, "--no-repack", "-f", text_file, "-c", 64, "-b", 16, "-ub", 16, "-t", 2]
    stock_logits, our_logits = (["--save-all-logits", tmp_path / name] for name in ("stock.logits", "our.logits"))
    stock = stock_program("llama-perplexity", *arguments, *stock_logits, folder=tmp_path, log="stock.log")
    arguments += [*our_logits, *as_two_words(out_file)]
    ours = launched("llama-perplexity", *arguments, folder=tmp_path, log="ours.log")
    assert stock_logits[1].read_bytes() == our_logits[1].read_bytes()
    both = list(zip(printed_perplexity(stock), printed_perplexity(ours)))
    assert len(both) >= LEAST_CHUNKS
    assert all(expected == got for expected, got in both)
    assert_recorded(out_file)


def printed_perplexity(output: str) -> list[str]:
    """The value after each chunk, as far as it was printed (see assert_same_text); the last one is the estimate."""
    return re.findall(r"\[\d+\]([\d.]+)", output)


def test_expert_placement_is_added_when_the_user_gave_none(tmp_path, rpc_endpoint):
    """Without it all experts would go to the RPC device, and the plugin would see none of them."""
    out_file = tmp_path / "experts.json"
    arguments = ["-m", generated("Q4_K"), "--no-repack", *GENERATE, "--rpc", rpc_endpoint, "-ngl", 99]
    stock = stock_program("llama-completion", *arguments, "--cpu-moe", folder=tmp_path, log="stock.log")
    ours = launched("llama-completion", *as_two_words(out_file), *arguments, folder=tmp_path, log="ours.log")
    assert_same_text(stock, ours, LEAST_TEXT)
    assert Profile.read(out_file).layers == [0, 1, 2]


@pytest.mark.parametrize("given", ["command line", "environment"])
def test_expert_placement_of_the_user_stays(tmp_path, rpc_endpoint, given):
    out_file = tmp_path / "experts.json"
    placement = ["--n-cpu-moe", 2] if given == "command line" else []
    environment = {"LLAMA_ARG_N_CPU_MOE": "2"} if given == "environment" else {}
    arguments = ["-m", generated("Q4_K"), *GENERATE, "--rpc", rpc_endpoint, "-ngl", 99, *placement]
    command = [paths.LAUNCHER, "llama-completion", *as_two_words(out_file), *arguments]
    run(command, tmp_path / "ours.log", stock_environment(**environment))
    assert_recorded(out_file)
    assert Profile.read(out_file).layers == [0, 1]
