"""The subcommands: what they say of real files."""

import csv
import functools
import io
import json
import re
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from models import generated

from commands import PROFILE_FORMATS, SHIPPED, answer, as_json, command, counts, prepare
from conftest import shipped_model
from launcher import assert_refused
from paths import REPOSITORY, STOCK_BIN
from processes import HANG_S, run, stock_environment


@pytest.fixture
def here(tmp_path) -> Path:
    return prepare(tmp_path)


def test_inspect_says_of_a_model_what_its_file_holds(here):
    seen = as_json(here, "inspect", "model.gguf")
    tensors = gguf.GGUFReader(shipped_model()).tensors
    experts = [tensor for tensor in tensors if "_exps" in tensor.name]
    assert seen["expert_bytes"] == sum(int(tensor.n_bytes) for tensor in experts)
    [layers] = seen["layers"]
    assert (layers["layers"], layers["n_expert"]) == (list(range(SHIPPED["layers"])), SHIPPED["n_expert"])
    assert layers["eligible"] and layers["bytes_per_expert"] * 32 * 6 == seen["expert_bytes"]
    others = [tensor for tensor in tensors if "_exps" not in tensor.name and tensor.name != "token_embd.weight"]
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    embeddings = sum(int(tensor.n_bytes) for tensor in tensors if tensor.name == "token_embd.weight")
    assert seen["other_bytes"] == sum(int(tensor.n_bytes) for tensor in others) + tied * embeddings
    assert seen["budgets"][-1]["slots_per_layer"] == SHIPPED["n_expert"]
    assert seen["budgets"][-1]["bytes"] >= seen["expert_bytes"]
    assert "0-5" in command(here, "inspect", "model.gguf")


def test_inspect_names_layers_without_experts(tmp_path):
    seen = as_json(tmp_path, "inspect", generated("F16", "deepseek2"))
    assert seen["without_experts"] == [0]
    assert "no: has no experts" in command(tmp_path, "inspect", generated("F16", "deepseek2"))


def test_inspect_says_why_large_experts_are_not_cached(tmp_path):
    path = tmp_path / "mixtral.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.expert_used_count", 2)
    writer.add_tensor("blk.0.ffn_down_exps.weight", np.zeros((8, 1024, 8448), dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    [layers] = as_json(tmp_path, "inspect", path)["layers"]
    assert not layers["eligible"] and "few large experts (2 of 8, 33 MiB)" in layers["reason"]
    verdict = as_json(tmp_path, "plan", path, "--vram", "200MiB", "--reserve", "1MiB")["verdict"]
    assert verdict["choice"] == "no_help" and "few large experts" in verdict["reason"]


def test_inspect_says_of_a_profile_how_its_requests_are_spread(here):
    seen = as_json(here, "inspect", "experts.json")
    requests = {layer: sum(of_layer.values()) for layer, of_layer in counts(here / "experts.json").items()}
    assert {layer["layer"]: layer["requests"] for layer in seen["layers"]} == requests
    for layer in seen["layers"]:
        of_layer = sorted(counts(here / "experts.json")[layer["layer"]].values(), reverse=True)
        for part in layer["coverage"]:
            best = sum(of_layer[: round(part["experts"] * SHIPPED["n_expert"])]) / sum(of_layer)
            assert part["requests"] == pytest.approx(best)
        shares = np.array(sorted([*of_layer, *[0] * (SHIPPED["n_expert"] - len(of_layer))])) / sum(of_layer)
        gini = np.abs(shares[:, None] - shares[None, :]).sum() / (2 * len(shares))
        assert layer["gini"] == pytest.approx(gini)


# ---- import, export, merge


@pytest.mark.parametrize("to", PROFILE_FORMATS)
def test_what_is_exported_can_be_imported_whatever_its_name(here, to):
    command(here, "export", "experts.json", "--to", to, "-o", "other.bin")
    done = as_json(here, "import", "other.bin", "-o", "back.json")
    assert (done["from"], done["to"], done["layers"]) == ([to], "perf-json", SHIPPED["layers"])
    assert counts(here / "back.json") == counts(here / "experts.json")


def test_a_trace_becomes_route_csv_and_replays_alike(here):
    command(here, "export", "routing.trace", "--to", "route-csv", "-o", "other.bin")
    as_json(here, "import", "other.bin", "-o", "back.json")
    assert counts(here / "back.json") == counts(here / "experts.json")
    replayed = [command(here, "replay", trace, "--policy", "lru").split() for trace in ("routing.trace", "other.bin")]
    hits = [[word for word in words if re.fullmatch(r"0?\.\d{3}", word)] for words in replayed]
    assert hits[0] == hits[1] and hits[0]


def test_an_imatrix_of_llama_imatrix_is_imported(here, tmp_path):
    text = (REPOSITORY / "tests/models/text").rglob("*")
    source = next(path for path in text if path.is_file() and path.stat().st_size > 4000)
    arguments = [
        "-m",
        "model.gguf",
        "-f",
        source,
        "-o",
        "real.gguf",
        "-c",
        128,
        "--chunks",
        2,
        "-t",
        1,
        "-ngl",
        0,
        "--no-ppl",
    ]
    run([STOCK_BIN / "llama-imatrix", *arguments], tmp_path / "imatrix.log", stock_environment())
    command(here, "import", "real.gguf", "-o", "real.json")
    requests = {sum(layer.values()) for layer in counts(here / "real.json").values()}
    assert requests == {2 * 128 * SHIPPED["n_used"]}


def test_a_file_of_counts_alone_is_no_importance_matrix(here):
    """What `export --to imatrix` writes must not be taken for one."""
    arguments = ["--imatrix", "imatrix.gguf", "model.gguf", "out.gguf", "Q4_0", "1"]
    done = subprocess.run(
        [STOCK_BIN / "llama-quantize", *arguments], cwd=here, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode != 0 and "failed to load imatrix" in done.stdout + done.stderr


def test_exported_tables_are_read_by_other_csv_readers(here):
    command(here, "export", "experts.json", "--to", "counts-csv", "-o", "counts.csv")
    rows = list(csv.DictReader(io.StringIO((here / "counts.csv").read_text())))
    assert len(rows) == SHIPPED["layers"] * SHIPPED["n_expert"]
    lines = (here / "hotness.csv").read_text().splitlines()
    assert lines[0] == "# hotness table: n_layer=6 n_expert=32 n_expert_used=4" and lines[1].startswith("#")
    assert len(lines) == 2 + SHIPPED["layers"] and all(
        len(line.split(",")) == SHIPPED["n_expert"] for line in lines[2:]
    )


def test_an_exported_imatrix_is_read_by_the_gguf_package(here):
    tensors = gguf.GGUFReader(here / "imatrix.gguf").tensors
    assert {tensor.name for tensor in tensors} == {
        f"blk.{n}.ffn_down_exps.weight.counts" for n in range(SHIPPED["layers"])
    }
    for tensor in tensors:
        expected = counts(here / "experts.json")[int(tensor.name.split(".")[1])]
        assert [int(value) for value in tensor.data.flatten()] == [
            expected.get(n, 0) for n in range(SHIPPED["n_expert"])
        ]


# Real recordings, which are not part of the project: format, layers, experts, and requests.
PUBLIC = {
    "traces/qwen.route.csv": ("route-csv", 48, 128, 48 * 128 * 6),
    "traces/gemma.route.csv": ("route-csv", 30, 128, 30 * 128 * 6),
    "profiles/specialist-benchprompt.csv": ("counts-csv", 40, 256, 400_000),
    "profiles/gemma4-26b-a4b-general-20260819.csv": ("counts-csv", 30, 128, 30_000_000),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_recordings_of_other_programs_are_imported(tmp_path, name):
    path = REPOSITORY.parent / "shared/data" / name
    if not path.exists():
        pytest.skip(f"{name} is not beside the project")
    done = as_json(tmp_path, "import", path, "-o", "experts.json")
    assert (*done["from"], done["layers"], done["n_expert"], done["requests"]) == PUBLIC[name]
    assert as_json(tmp_path, "inspect", "experts.json")["requests"] == done["requests"]


def test_merging_weighs_sessions_and_not_their_lengths(here):
    command(here, "merge", "chat.json", "code.json", "--weights", "3,1", "-o", "merged.json")
    chat, code, merged = (counts(here / name) for name in ("chat.json", "code.json", "merged.json"))

    def share(of_layer: dict[int, int], expert: int) -> float:
        return of_layer.get(expert, 0) / sum(of_layer.values())

    well_counted = [layer for layer, of_layer in chat.items() if sum(of_layer.values()) > 1000]
    assert len(well_counted) == 5, "the last layer computes only rows that are wanted"
    for layer in well_counted:
        of_layer = merged[layer]
        for expert in of_layer:
            wanted = (3 * share(chat[layer], expert) + share(code[layer], expert)) / 4
            assert share(of_layer, expert) == pytest.approx(wanted, abs=2e-3)
    assert command(here, "inspect", "merged.json")


def test_a_merged_profile_is_used_by_plan(here):
    command(here, "merge", "experts.json", "code.json", "-o", "merged.json")
    planned = as_json(here, "plan", "model.gguf", "--profile", "merged.json", "--vram", "20MiB", "--reserve", "2MiB")
    assert planned["cache"]["hit_rate_from_profile"]


# ---- calibrate and plan


@functools.cache
def measured() -> str:
    with tempfile.TemporaryDirectory() as name:
        command(Path(name), "calibrate", "--threads", "1")
        return (Path(name) / "config/moe-hot/calibration.json").read_text()


def calibrated(folder: Path, ram: float, gpu: float | None, overhead: float) -> None:
    """What this machine would store if it had these figures."""
    path = folder / "config/moe-hot/calibration.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(measured())
    stored["ram_gb_per_s"]["value"] = ram
    stored["gpu_gb_per_s"] = gpu and {"value": gpu, "source": "given"}
    stored["layer_overhead_us"] = {"value": overhead, "source": "given"}
    path.write_text(json.dumps(stored))


def test_calibrate_measures_memory_and_keeps_what_was_given(tmp_path):
    first = as_json(tmp_path, "calibrate", "-t", "1", "--gpu-bandwidth", "360", "--bus-bandwidth", "12")
    assert first["ram_gb_per_s"]["source"] == "measured" and first["gpu_gb_per_s"] == {"value": 360, "source": "given"}
    assert 0.1 < first["ram_least_gb_per_s"] <= first["ram_gb_per_s"]["value"] <= first["ram_most_gb_per_s"] < 1000
    again = command(tmp_path, "calibrate", "-t", "1")
    assert "360.0 GB/s  not measured: given" in again and "assumed; give it with --layer-overhead" in again
    path = tmp_path / "config/moe-hot/calibration.json"
    assert str(path) in again and [path] == list(path.parent.iterdir())


def test_plan_says_what_is_missing_and_what_to_do(here):
    plan = ["plan", "model.gguf", "--vram", "15MiB", "--reserve", "2MiB", "-c", "1024"]
    said = command(here, *plan)
    assert "not known yet" in said and "run moe-hot calibrate --gpu-bandwidth" in said and "no profile" in said
    calibrated(here, 10, None, 0)
    said = command(here, *plan, "--profile", "experts.json")
    assert "the GPU's bandwidth is unknown" in said and "unknown" in said
    assert "the profile counts 516 tokens: with fewer than 2000" in said
    path = here / "config/moe-hot/calibration.json"
    path.write_text(path.read_text().replace('CPUs"', 'CPUs of another"'))
    assert "another machine" in command(here, *plan)
    path.write_text("{")
    assert_refused(answer(here, *plan), str(path), "run it again")


def test_plan_predicts_by_the_formula(here):
    ram, gpu, overhead = 5e9, 300e9, 3e-6
    calibrated(here, ram / 1e9, gpu / 1e9, overhead * 1e6)
    plan = as_json(
        here, "plan", "model.gguf", "--profile", "experts.json", "--vram", "15MiB", "--reserve", "2MiB", "-c", "1024"
    )
    shape = as_json(here, "inspect", "model.gguf")
    memory, layers = plan["memory"], SHIPPED["layers"]
    assert memory["kv_cache"] == 1024 * layers * 2 * (64 + 64) * 2
    assert memory["for_experts"] == 15 * 2**20 - shape["other_bytes"] - memory["kv_cache"] - 2 * 2**20
    assert plan["cache"]["bytes"] <= memory["for_experts"]
    whole = plan["n_cpu_moe"]
    assert whole["bytes"] == (layers - whole["n"]) * shape["layers"][0]["bytes_per_layer"] <= memory["for_experts"]
    experts = layers * SHIPPED["n_used"] * shape["layers"][0]["bytes_per_expert"]
    other, hits, share = shape["other_bytes"] / gpu, plan["cache"]["hit_rate"], whole["share_of_experts"]
    cached = other + max(hits * experts / gpu, (1 - hits) * experts / ram) + layers * overhead
    stock = other + share * experts / gpu + (1 - share) * experts / ram + whole["n"] * 10e-6
    speeds = plan["verdict"]["speeds"]
    assert speeds["cache"] == pytest.approx(1 / cached) and speeds["n_cpu_moe"] == pytest.approx(1 / stock)
    assert speeds["cpu_moe"] == pytest.approx(1 / (other + experts / ram + layers * 10e-6))
    even = speeds["break_even_hit_rate"]
    assert other + max(even * experts / gpu, (1 - even) * experts / ram) + layers * overhead == pytest.approx(stock)


# name: RAM and GPU in GB/s, overhead in µs, memory in MiB, whether there is a profile, and the verdict.
VERDICTS = {
    "slow RAM, cheap launches": (1, 300, 1, 11, True, "cache", "times as fast as --n-cpu-moe"),
    "launches that cost too much": (1, 300, 5000, 11, True, "whole_layers", "no hit rate makes up"),
    "not even one layer fits": (50, 300, 5000, 6, True, "no_help", "times as fast as --cpu-moe"),
    "everything fits": (1, 300, 1, 40, True, "no_help", "the whole model fits"),
    "the rest alone does not fit": (1, 300, 1, 4, True, "no_help", "more than 4.0 MiB"),
    "too few slots": (1, 300, 1, 5.2, True, "no_help", "too few slots"),
    "no profile, and chance is not enough": (1, 300, 60, 11, False, "unknown", "record one"),
    "no profile, and none is needed": (0.1, 300, 1, 12, False, "cache", "times as fast as --n-cpu-moe"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_rests_on_numbers(here, name):
    ram, gpu, overhead, mib, has_profile, choice, reason = VERDICTS[name]
    calibrated(here, ram, gpu, overhead)
    size = f"{int(mib * 2**20)}"
    profile = ["--profile", "experts.json"] if has_profile else []
    arguments = ["plan", "model.gguf", "--vram", size, "--reserve", "1MiB", "-c", "512", *profile]
    verdict = as_json(here, *arguments)["verdict"]
    assert verdict["choice"] == choice and reason in verdict["reason"], verdict
    assert verdict["reason"] in command(here, *arguments)


def test_a_larger_memory_never_brings_fewer_hits(here):
    def hits(mib: int) -> float:
        planned = as_json(
            here, "plan", "model.gguf", "--profile", "experts.json", "--vram", f"{mib}M", "--reserve", "1M", "-c", "256"
        )
        return planned["cache"]["hit_rate"] if planned["cache"] else 0

    rates = [hits(mib) for mib in range(4, 18, 2)]
    assert rates == sorted(rates) and rates[0] < rates[-1] == pytest.approx(1)
