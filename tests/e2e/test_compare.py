"""`moe-hot compare`: whole comparisons of the shipped model on small devices, interrupted and gone on with, and what is refused.

Nothing here asserts a speed: the devices are computed by the processor."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paths
import vulkan
from browser import CHROMIUM, open_page
from commands import environment
from conftest import shipped_model
from launcher import Answer, assert_refused, launch
from patched import needs_build
from processes import process, stock_environment, wait_for

sys.path.insert(0, str(paths.REPOSITORY / "scripts"))
from device import models

SCHEMA = "moe-hot.compare.v1"
STOCK = ["cpu-moe", "n-cpu-moe", "fit"]
OURS = ["hot-fixed", "hot-cold", "hot-profile"]
COMPILING_S = 1800
WHOLE_LIMIT_S = 180
KINDS = {"story": "prose", "code": "code"}
PROMPT_CHARACTERS = 300


def prompts() -> str:
    """Three of each kind, from the texts that the model was trained on."""
    text = ""
    for kind, file in KINDS.items():
        words = (paths.REPOSITORY / f"tests/models/text/{file}.txt").read_text()
        parts = [words[n * PROMPT_CHARACTERS :][:PROMPT_CHARACTERS] for n in range(3)]
        text += f"== {kind} ==\n" + "\n---\n".join(parts) + "\n"
    return text


# A cache does not pay on a processor's own cores and would be given up.
NO_GUARD = {"MOE_HOT_TEST_NO_GUARD": "1"}
SMALL = ["--pp", "32", "--tg", "6", "--depth", "0", "--pairs", "1", "--answer", "12", "-c", "512", "--threads", "1"]
# Two layers of six fit.
VRAM = ["--vram", "14MiB"]


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "model.gguf").symlink_to(shipped_model())
    (tmp_path / "prompts.txt").write_text(prompts())
    return tmp_path


def command(*arguments) -> list:
    return [paths.LAUNCHER, "compare", "-m", "model.gguf", "--prompts", "prompts.txt", *arguments]


def compare(here: Path, *arguments, variables: dict | None = None, timeout_s: float = WHOLE_LIMIT_S) -> Answer:
    ours = stock_environment(**environment(here), **NO_GUARD) | (variables or {})
    words = [str(word) for word in command(*arguments)]
    done = subprocess.run(words, cwd=here, env=ours, capture_output=True, text=True, timeout=timeout_s)
    return Answer(done.returncode, done.stdout, done.stderr)


def read(here: Path) -> dict:
    return json.loads((here / "out/results.json").read_text())


def figures(results: dict, arm: str) -> dict[str, dict]:
    """By measure, what was found of an arm."""
    found = {}
    for measure in results["summary"]["measures"]:
        (found[measure["name"]],) = [figure for figure in measure["figures"] if figure["arm"] == arm]
    return found


def arm_of(results: dict, arm: str) -> dict:
    (found,) = [one for one in results["summary"]["arms"] if one["arm"] == arm]
    return found


def assert_whole(here: Path, results: dict, arms: list[str], exact: bool) -> None:
    assert (results["schema"], results["complete"]) == (SCHEMA, True)
    baseline = arm_of(results, "n-cpu-moe")["memory"]
    tuned = results["summary"]["tuned"]
    assert 0 < tuned["n_cpu_moe"] < 6 and tuned["cache_mib"] > 0
    for arm in arms:
        summary, of_arm = arm_of(results, arm), figures(results, arm)
        assert summary["marked"] == []
        assert all(figure["spread"]["median"] > 0 for figure in of_arm.values()), arm
        assert {"decode of 6 tokens", "decode, story", "first token, code", "decode, switch"} <= set(of_arm)
        if exact:
            assert summary["agreement"]["median"] == 1 and summary["not_measured"] == [], summary
            assert summary["logits"]["same_top"] > 0.999 and abs(summary["logits"]["mean_kld"]) < 1e-4, summary["logits"]
        else:
            assert summary["agreement"]["median"] > 0
        if arm in OURS:
            total = sum(summary["memory"][name] for name in ("model_mib", "context_mib", "cache_mib"))
            assert total <= 1.02 * (baseline["model_mib"] + baseline["context_mib"]) + 1
            assert 0 < summary["hit_rate"]["median"] < 1 and summary["copied_mib"]["median"] > 0
            assert summary["memory"]["cache_mib"] > 0
    assert all(figure["ratio"]["median"] == 1 for figure in figures(results, "n-cpu-moe").values())
    (record,) = [step for key, step in results["steps"].items() if key == "record"]
    assert [turn["kind"] for turn in record["turns"]] == ["story", "code"], "one prompt of each kind, never measured"
    measured = [turn["conversation"] for turn in results["steps"]["reference"]["turns"]]
    assert measured == ["story", "code", "switch", "switch"]
    table = (here / "out/table.md").read_text()
    assert all(f"| {label} |" in table for label in ("stock --n-cpu-moe, best N", "moe-hot, fixed profile"))


def test_a_whole_comparison_on_an_rpc_device_interrupted_and_gone_on_with(here, rpc_endpoint):
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", *VRAM, *SMALL]
    began = time.monotonic()
    ours = stock_environment(**environment(here), **NO_GUARD)
    log = here / "first.log"
    with process(command(*device, "-o", "out"), log, ours) as child:
        results = here / "out/results.json"
        wait_for("some steps are done", lambda: results.exists() and "bench-0-cpu-moe" in read(here)["steps"])
        wait_for("the next one runs", lambda: "n-cpu-moe, best N: llama-bench" in log.read_text())
        wait_for("it has a child", lambda: running_with(rpc_endpoint))
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=20) == 1
    assert "interrupted; the same command goes on from here" in log.read_text()
    assert not running_with(rpc_endpoint), "its children have ended"
    before = read(here)
    assert not before["complete"] and "summary" not in before

    done = compare(here, *device, "-o", "out")
    assert done.code == 0, done
    assert f"{len(before['steps'])} of " in done.err and "runs are done already" in done.err
    after = read(here)
    assert {key: after["steps"][key] for key in before["steps"]} == before["steps"], "nothing is done twice"
    # The RPC server's device is a processor too, and computes the same.
    assert_whole(here, after, STOCK + OURS, exact=True)
    assert done.out.startswith("# moe-hot compare: ") and done.out.count("## server: ") == 6
    assert time.monotonic() - began < WHOLE_LIMIT_S

    again = compare(here, *device, "-o", "out")
    assert again.code == 0 and read(here) == after, "everything was there"
    other = compare(here, *changed(device, "--tg", "7"), "-o", "out")
    assert_refused(other, "--output out: was begun with --tg 6, and now it is 7; expected the same settings")
    if CHROMIUM:
        assert_page(here)


def changed(arguments: list[str], flag: str, value: str) -> list[str]:
    at = arguments.index(flag)
    return [*arguments[: at + 1], value, *arguments[at + 2 :]]


def running_with(word: str) -> list[str]:
    """Command lines of llama.cpp's programs with this word in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and "llama-" in line:
            found.append(line)
    return found


def assert_page(here: Path) -> None:
    """It opens without asking for anything, in light and dark, and nothing sticks out."""
    with open_page(here) as page:
        page.open((here / "out/report.html").as_uri())
        assert [url for url in page.requested if not url.startswith("file:")] == []
        assert len(page.requested) == 1
        for width in (400, 1600):
            for scheme in ("light", "dark"):
                page.look(width, 900, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                backs = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", backs)[:3])) > 384) == (scheme == "light")
        n_measures = len(read(here)["summary"]["measures"])
        assert page.evaluate("document.querySelectorAll('svg').length") == n_measures
        assert page.evaluate("[...document.querySelectorAll('svg')].every((s) => s.getBoundingClientRect().width > 250)")
        rows = page.evaluate("[...document.querySelectorAll('td')].map((cell) => cell.innerText)")
        assert any("moe-hot, learning from a profile" in row for row in rows)
    assert not re.search(r"https?:|<script|<link", (here / "out/report.html").read_text())


def test_a_cache_has_as_much_memory_as_whole_layers_with_the_scratch_memory_that_they_need(here, rpc_endpoint):
    """For a prompt whole layers of this model need nearly as much scratch memory as their experts take."""
    models.write_model(here / "model.gguf.made", models.SMALL)
    (here / "model.gguf").unlink()
    (here / "model.gguf.made").rename(here / "model.gguf")
    small = changed(changed(SMALL, "--pp", "512"), "-c", "2048")
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", *small, "--ubatch-size", "512", "--vram", "24MiB"]
    done = compare(here, *device, "--arms", "n-cpu-moe,hot-fixed", "-o", "out")
    assert done.code == 0, done
    steps = read(here)["steps"]
    taken = {
        (program, arm): sum(steps[f"{program}-0-{arm}"]["memory"][name] for name in ("model_mib", "context_mib", "cache_mib"))
        for program in ("bench", "server")
        for arm in ("n-cpu-moe", "hot-fixed")
    }
    for program in ("bench", "server"):
        assert -1.5 < taken[program, "hot-fixed"] - taken[program, "n-cpu-moe"] <= 1, taken
    scratch = [steps[key]["memory"]["context_mib"] for key in ("tune-memory", "bench-0-n-cpu-moe")]
    assert scratch[1] > scratch[0] + 1, "else this tests nothing"


@needs_build
def test_patched_servers_say_what_layers_wait_for(here, rpc_endpoint):
    """In results.json, in the table, and on the page; their llama-bench has caches that count."""
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", "--programs", paths.PATCHED_BIN, *changed(SMALL, "--tg", "12"), *VRAM]
    arms = ["n-cpu-moe", "hot-fixed"]
    done = compare(here, *device, "--ubatch-size", "32", "--arms", ",".join(arms), "-o", "out")
    assert done.code == 0, done
    results = read(here)
    summary = arm_of(results, "hot-fixed")
    assert summary["marked"] == [] and summary["not_measured"] == []
    layers = results["steps"]["waits-hot-fixed"]["layers"]
    assert [layer["layer"] for layer in layers] == list(range(6))
    assert all(layer["calls"] > 0 and layer["device_us"] > 0 for layer in layers)
    calls, waits = (sum(layer[name] for layer in layers) for name in ("calls", "wait_us"))
    assert summary["wait_us"] == pytest.approx(waits / calls) and waits > 0
    assert [layer["wait_us"] for layer in summary["layers"]] == [layer["wait_us"] / layer["calls"] for layer in layers]
    assert arm_of(results, "n-cpu-moe")["wait_us"] is None, "stock has no lanes"
    assert "waits-n-cpu-moe" not in results["steps"]
    turns = results["steps"]["server-0-hot-fixed"]["turns"]
    assert all(0 < turn["hits"] < turn["requests"] for turn in turns)
    table, page = ((here / f"out/{name}").read_text() for name in ("table.md", "report.html"))
    (row,) = (line for line in table.splitlines() if line.startswith("| moe-hot, fixed profile |") and line.count("|") == 12)
    assert row.split("|")[8].strip() == f"{summary['wait_us']:.1f}" and f"<td>{summary['wait_us']:.1f}</td>" in page
    assert "## Layers: computing" in table and "<h2>Layers: computing" in page
    for layer in summary["layers"]:
        cells = [str(layer["layer"]), *(f"{layer[name]:.1f}" for name in ("cpu_us", "device_us", "wait_us"))]
        assert f"| {' | '.join(cells)} |" in table
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page


@pytest.mark.full
def test_a_whole_comparison_on_vulkan(here):
    """Single tokens and short prompts, since kernels for more compile for minutes: too short to compare logits, which is said.
    Those of dense layers take minutes too, the first time."""
    vulkan.require()
    (here / "prompts.txt").write_text("== story ==\nOnce\n---\nThe house\n---\nShe\n== code ==\ndef\n---\nclass\n---\nfor\n")
    small = changed(changed(SMALL, "--pp", "4"), "--answer", "8")
    device = ["--programs", vulkan.BIN, "--device", vulkan.DEVICE, "--arms", "n-cpu-moe,hot-fixed", *VRAM, *small, "--ubatch-size", "1"]
    done = compare(here, *device, "-o", "out", variables=vulkan.vulkan_environment(**environment(here), **NO_GUARD), timeout_s=COMPILING_S)
    assert done.code == 0, done
    results = read(here)
    assert_whole(here, results, ["n-cpu-moe", "hot-fixed"], exact=False)
    assert results["steps"]["server-0-hot-fixed"]["memory"]["device_mib"] is not None, "the device was asked"
    assert "too short to compare logits" in arm_of(results, "hot-fixed")["not_measured"][0]


def write_programs(folder: Path, script: str) -> Path:
    """Programs that do what this shell script does."""
    folder.mkdir()
    for name in ("llama-bench", "llama-server", "llama-perplexity"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n".replace("NAME", name))
        (folder / name).chmod(0o755)
    return folder


def test_a_cache_that_was_off_is_marked_and_not_averaged(here, rpc_endpoint):
    """These programs do not load the plugin, as builds without GGML_BACKEND_DL do not."""
    programs = write_programs(here / "programs", f'exec env -u GGML_BACKEND_PATH "{paths.STOCK_BIN}/NAME" "$@"')
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", "--programs", programs]
    done = compare(here, *device, *VRAM, *SMALL, "--ubatch-size", "32", "--arms", "n-cpu-moe,hot-cold", "-o", "out")
    assert done.code == 0, done
    results = read(here)
    marked = arm_of(results, "hot-cold")["marked"]
    assert {run["step"] for run in marked} == {"bench-0-hot-cold", "server-0-hot-cold", "logits-hot-cold"}
    assert {run["reason"] for run in marked} == {"no line says that a cache was on"}
    assert all(figure["spread"] is None and figure["values"] == [None] for figure in figures(results, "hot-cold").values())
    assert all(figure["spread"] for figure in figures(results, "n-cpu-moe").values())
    assert "**Not counted**: moe-hot, learning from cold" in done.out


# name: arguments, and what the line says.
REFUSED = {
    "no model": (["-m", "none.gguf"], ["--model", "none.gguf"]),
    "no experts' memory": (["--vram", "12"], ["'12'", "--vram", "12GiB"]),
    "no pairs": (["--pairs", "0"], ["'0'", "--pairs"]),
    "no tokens": (["--pp", "0"], ["'0'", "--pp"]),
    "prompts that are not there": (["--prompts", "none.txt"], ["--prompts none.txt"]),
    "prompts without kinds": (["--prompts", "plain.txt"], ["--prompts plain.txt", "line 1", "== story =="]),
    "no baseline": (["--arms", "cpu-moe,hot-cold"], ["--arms", "expected n-cpu-moe among them"]),
    "an unknown arm": (["--arms", "gpu"], ["'gpu'", "hot-fixed"]),
    "llama.cpp's cache in a llama.cpp without one": (["--arms", "n-cpu-moe,moe-cache-mib"], ["moe-cache-mib", "b11480"]),
    "a device that is not there": (["--device", "CUDA7"], ["--device CUDA7", "no device"]),
    "no device at all": ([], ["no GPU", "--rpc"]),
    "programs that are not there": (["--programs", "nowhere"], ["--programs", "nowhere"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(here, name):
    arguments, said = REFUSED[name]
    (here / "plain.txt").write_text("hello\n")
    model = [] if "-m" in arguments else ["-m", "model.gguf"]
    answer = launch("compare", *model, *arguments, "-o", "out", cwd=here, **environment(here))
    assert_refused(answer, *said)
    assert not (here / "out").exists()


def test_memory_in_which_there_is_nothing_to_compare_and_folders_of_others_are_refused(here, rpc_endpoint):
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", *SMALL, "--ubatch-size", "32"]
    for size, said in (("200MiB", "the whole model takes"), ("3MiB", "without any expert; expected more")):
        answer = compare(here, *device, "--vram", size, "-o", size)
        last = answer.err.splitlines()[-1]
        assert answer.code == 2 and answer.out == "" and last.startswith("moe-hot: --vram ") and said in last, answer
    assert_refused(compare(here, *device, *VRAM, "-o", "."), "--output .: has other files in it")
    for size, said in (("900TiB", "RPC0 has "), ("1MiB", "the experts of one layer alone take")):
        for more in ([], ["--dry-run"]):
            assert_refused(compare(here, *device, "--vram", size, "-o", "early", *more), "--vram ", said)
        assert not (here / "early").exists(), "nothing was begun"


def test_a_comparison_goes_on_with_the_same_device_and_build_only(here, rpc_endpoint):
    device = ["--rpc", rpc_endpoint, "--device", "RPC0", *SMALL, "--ubatch-size", "32", "--arms", "n-cpu-moe", *VRAM]
    assert compare(here, *device, "-o", "out").code == 0
    begun = read(here)
    assert begun["steps"]["tune-memory"]["device"] == f"({rpc_endpoint}) (unknown id)"
    assert len(begun["settings"]["moe_hot_build"]) == 16

    def edited(change) -> Answer:
        results = json.loads(json.dumps(begun))
        change(results)
        (here / "out/results.json").write_text(json.dumps(results))
        return compare(here, *device, "-o", "out")

    built = edited(lambda results: results["settings"].update(moe_hot_build="0" * 16))
    assert_refused(built, "--output out: was begun with the build of moe-hot 0000000000000000, and now it is ")
    assert_refused(edited(lambda results: results["machine"].update(device="GPU")), "was begun on the device GPU, ")

    # Two of one kind: only a run says where it is.
    def elsewhere(results: dict) -> None:
        results["steps"].pop("bench-0-n-cpu-moe")
        results["steps"]["tune-memory"]["device"] = f"({rpc_endpoint}) (0000:02:00.0)"
        results["steps"] = {"tune-memory": results["steps"].pop("tune-memory")}

    other = edited(elsewhere)
    last = other.err.splitlines()[-1]
    assert other.code == 2 and "ran on the device" in last and "0000:02:00.0" in last, other
    assert list(read(here)["steps"]) == ["tune-memory"], "it is not kept"


def test_programs_of_different_revisions_are_refused(here):
    program = """case "NAME" in llama-bench) build="build 11312, commit 0c1e57098";; *) build="build 11434, commit 79c1160b0";; esac
case "$1" in --version) echo "version: 0.5.0 ($build)";; *) echo "--list-devices  x";; esac"""
    write_programs(here / "programs", program)
    answer = compare(here, "--programs", "programs", "-o", "out")
    assert_refused(answer, "llama-server is llama.cpp", "11434", "expected programs of one revision")


def test_a_dry_run_lists_all_runs_and_starts_nothing(here):
    listed = compare(here, "--pairs", "2", "--vram", "14MiB", "-o", "out", "--dry-run")
    assert listed.code == 0, listed
    rows = [re.split(r"  +", line.strip()) for line in listed.out.splitlines()]
    benches = [(row[0], row[1]) for row in rows if "llama-bench" in row]
    labels = [arm for pair, arm in benches if pair == "1"]
    assert len(labels) == len(STOCK + OURS) and labels[:2] == ["stock --cpu-moe", "stock --n-cpu-moe, best N"]
    assert [arm for pair, arm in benches if pair == "2"] == labels[::-1], "alternated"
    assert "nothing was started" in listed.out and not (here / "out").exists()
