"""scripts/device-check, the whole of it, on a device behind an RPC server; and what it is made of. Figures mean nothing here."""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import paths
from processes import HANG_S, wait_for

sys.path.insert(0, str(paths.REPOSITORY / "scripts"))
from device import budget, folder, models, report, routing, speeds, tensors
from device import check as device_check

PARTS = ("conformance", "rows", "model", "routing", "threads", "overhead", "cache", "layers", "prompts", "copies", "compare")
MINUTES = 1.0
# On the CPU behind the server: its answers are the CPU's, bit for bit.
SAME = 0
HITS_BY_CHANCE = 0.125


def run(command: list, **options) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    return subprocess.run(words, timeout=HANG_S, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    packed = tmp_path_factory.mktemp("device")
    made = run([paths.REPOSITORY / "scripts/device-pack", "--without-cuda", packed])
    assert made.returncode == 0, made.stderr[-2000:]
    assert sorted(path.name for path in packed.iterdir()) == ["device-check", "pack.tar.xz"]
    return packed


def check(pack, *arguments) -> subprocess.CompletedProcess:
    """As on a bare machine: no packages of Python's, nothing in the environment."""
    bare = {"PATH": os.environ["PATH"], "HOME": str(pack)}
    return run([sys.executable, "-S", "-E", pack / "device-check", *arguments], env=bare, cwd=pack)


@pytest.fixture(scope="module")
def checked(pack):
    """What one whole run leaves: results, report, and what it prints."""
    arguments = [
        "--device",
        "RPC0",
        "--no-guard",
        "--size",
        "small",
        "--minutes",
        MINUTES,
        "--report",
        pack / "report.json",
        "-o",
        pack / "out",
    ]
    done = check(pack, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads((pack / "out/results.json").read_text()), (pack / "report.json").read_text(), done.stdout


def result(checked, name: str) -> dict:
    """Of a part; a machine with other work may have no time for it, and that is said as it should be."""
    part = checked[0]["parts"][name]
    if part["status"] == "skipped" and ("time" in part["reason"] or "were left" in part["reason"]):
        pytest.skip(part["reason"])
    return part["result"]


def test_every_part_has_a_result_or_a_reason(checked):
    results, _, table = checked
    assert sorted(results["parts"]) == sorted(PARTS)
    for name, part in results["parts"].items():
        assert part["status"] in ("done", "skipped")
        assert part["result"] if part["status"] == "done" else part["reason"]
        assert any(line.split()[0] == name for line in table.splitlines())
    assert not results["has_failed"] and results["machine"]["device"]["name"] == "RPC0"


def test_copy_engines_conform_there(checked):
    assert result(checked, "conformance")["engines"] == [
        {"engine": "portable", "page_locked": True},
        {"engine": "portable", "page_locked": False},
    ]


def test_rows_come_from_the_device_and_are_the_cpus(checked):
    found = result(checked, "rows")
    of_types = [of_type for of_type in found["types"].values() if "error" in of_type]
    assert found["types"].keys() == tensors.TYPES.keys() and len(of_types) == found["checked"] > 0
    assert all(of_type["error"] == SAME and of_type["hits"] > 0 for of_type in of_types)


def test_the_generated_model_routes_with_habits(checked):
    results = result(checked, "routing")
    assert results.keys() == {"generated", *routing.REAL}
    for found in results.values():
        assert found["overlap"] > found["experts_per_token"] / found["experts"], "as dice"
        assert HITS_BY_CHANCE < found["coverage"]["12.5%"] < found["coverage"]["50.0%"] <= 1
        assert found["hits"]["lru"]["25.0%"] <= found["hits"]["belady"]["25.0%"]


def test_what_cannot_be_measured_here_says_why(checked):
    parts = checked[0]["parts"]
    assert parts["copies"]["status"] == "skipped" and "CUDA" in parts["copies"]["reason"]


def test_the_report_does_not_tell_whose_machine_it_is(checked):
    _, text, _ = checked
    own = [str(paths.REPOSITORY), os.environ["HOME"], os.uname().nodename, "/tmp", "127.0.0.1"]
    assert [word for word in own if len(word) > 1 and word in text] == []
    assert json.loads(text)["table"]


# What is said, and what of it stays.
PERSONAL = {
    "by Mallory": "by (name)",
    "at /home/mallory/x y on zephyr": "at (path) y on (name)",
    "10.1.2.3:50052": "(address)",
    "a0:b1:c2:d3:e4:f5": "(address)",
    "m@zephyr.example": "(address)",
    "mallory_models": "(name)_models",
    "asked by ruth": "asked by (name)",
    "/data/my models/of ruth's.gguf": "(path)",
    "no such file: /data/my own models/x.gguf: denied": "no such file: (path): denied",
    "cannot open '/data/x y': denied": "cannot open (path): denied",
    "in /home/mal lory/x now": "in (path) now",
    "../secret": "(path)",
    "at ./home/..": "at (path)",
    "at ~/secret": "at (path)",
    "path=/data/x": "path=(path)",
    "fe80::1%eth0": "(address)",
    "at [2001:db8::7]:50052": "at (address)",
    "2001:db8:0:1:2:3:4:5: refused": "(address): refused",
    "::1": "(address)",
    "/usr/bin/llama-bench -m /tmp/x -n 3": "(path) -m (path) -n 3",
}
IMPERSONAL = [
    "12.0 tokens/s, Q4_K, CUDA 13.0",
    "cache (1 MiB) / --cpu-moe: 1.3 (1.2 to 1.4)",
    "device::copies at 12:34:56",
    "2026-11-30",
    "Linux 6.1.0",
]


@pytest.fixture
def owner(monkeypatch):
    monkeypatch.setattr(report.socket, "gethostname", lambda: "zephyr.example")
    monkeypatch.setattr(report.getpass, "getuser", lambda: "mallory")
    monkeypatch.setenv("SUDO_USER", "ruth")
    monkeypatch.setenv("HOME", "/home/mal lory")


@pytest.mark.parametrize("said", PERSONAL)
def test_names_folders_and_addresses_are_taken_out(owner, said):
    assert report.without_personal_data({"a": [said, 3]}) == {"a": [PERSONAL[said], 3]}


@pytest.mark.parametrize("said", IMPERSONAL)
def test_what_is_not_personal_stays(owner, said):
    assert report.without_personal_data(said) == said


def test_keys_stay_whatever_the_user_is_called(monkeypatch, owner):
    monkeypatch.setattr(report.getpass, "getuser", lambda: "device")
    assert report.without_personal_data({"device": {"name": "of device"}}) == {"device": {"name": "of (name)"}}


def test_of_a_command_flags_and_numbers_are_shown():
    arguments = ["--report", "jane.json", "--minutes", "1.5", "--size=small", "-ojane", "-o", "jane 7/x", "--layers", "3", "12x"]
    assert report.shown_command(arguments) == "scripts/device-check --report --minutes 1.5 --size -o -o --layers 3"


def test_an_unknown_device_is_refused(pack):
    done = check(pack, "--device", "CUDA7", "--size", "small")
    assert done.returncode == 2
    assert "CUDA7" in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_time_nothing_counts_as_passed(pack):
    done = check(pack, "--device", "RPC0", "--size", "small", "--minutes", 0.15, "-o", pack / "short")
    results = json.loads((pack / "short/results.json").read_text())
    skipped = [part for part in results["parts"].values() if part["status"] == "skipped"]
    assert done.returncode == 0 and len(skipped) > len(PARTS) / 2
    assert all(part["reason"] for part in skipped)


# A CUDA driver of which copies can be asked: memory is the host's, and a stream or context that it has not made is refused, and
# any device but the second.
DRIVER = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static uint64_t begin, end;
static int locked;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int n) { *device = 10 + n; return n != 1; }
int cuDeviceGetPCIBusId(char *at, int size, int device) {
    return size < 13 || !strcpy(at, "0000:0a:00.0") || device != 11;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &begin; return device != 11; }
int cuCtxSetCurrent(void *context) { return context != &begin; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = &end; return flags != 1; }
int cuStreamSynchronize(void *stream) { return stream != &end; }
int cuMemAlloc_v2(uint64_t *at, size_t size) { *at = begin = (uint64_t) malloc(size); end = begin + size; return 0; }
int cuMemHostAlloc(void **at, size_t size, unsigned flags) { *at = malloc(size); locked++; return flags; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    (void) to;
    if (!locked || stream != &end) return 700;
    static char sink[1 << 20];
    memcpy(sink, from, size < sizeof sink ? size : sizeof sink);
    return 0;
}
"""
COPIES = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from device import budget, copies, machine, models, speeds
copies.ALONE_S = 0.05
class Programs:
    budget = budget.Budget(60, time.monotonic())
    heard = []
    def run(self, command, heard):
        assert command[command.index("-r") + 1] == 7 and "--progress" in command
        for words, call in heard.items():
            self.heard.append(words)
            call()
            time.sleep(0.05)
        return json.dumps([{"n_prompt": 0, "samples_ts": [10.0, 8.0] * 3 + [99.0]}]), "", 0
found = copies.measure(speeds.Bench(Programs(), None, models.SMALL, "CUDA1", [], 99, 1))
said = [machine.nvidia(f"{kind}1") for kind in ("CUDA", "Vulkan")]
print(json.dumps({"copies": found, "heard": Programs.heard, "nvidia": said}))
"""


def test_copies_go_through_the_driver(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    built = run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"])
    assert built.returncode == 0, built.stderr
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho \"$1 $2, 1 MiB\"\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(tmp_path)}
    done = run([sys.executable, "-c", COPIES, paths.REPOSITORY / "scripts"], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["nvidia"] == [{"name": "-i 0000:0a:00.0", "memory.total": "1 MiB"}, None]
    assert said["heard"] == [f"generation run {number}/" for number in range(2, 8)]
    found = said["copies"]
    assert min(found["alone_mb_per_s"].values()) > 0 and found["beside_the_cpu_mb_per_s"] > 0
    assert found["decode"] == {"without copies": 10, "beside copies": 8}
    assert found["decode_kept"] == 0.8 and found["block_bytes"] == 3 * 256 * 144
    assert all(report.of_copies(found))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_words_are_heard_while_a_program_runs(tmp_path):
    """In their order, once each, and those that are in other words are not taken for them."""
    programs = folder.Programs(tmp_path, budget.Budget(budget.RESERVE_S + 60, time.monotonic()))
    before = "echo warmup run >&2; sleep 0.2"
    script = f"{before}; echo run 1/2 >&2; until [ -e go ]; do sleep 0.02; done; echo run 2/2 >&2; sleep 0.5"
    heard = []
    calls = {"run 1/": lambda: (heard.append(1), (tmp_path / "go").touch()), "run 2/": lambda: heard.append(2)}
    programs.run(["sh", "-c", script], heard=calls)
    assert heard == [1, 2]


FIRST_CONTEXT = """0.04 W moe-hot: hot cache on RPC0: 2 MiB, 32 slots per layer (32 experts) in 1 layers; nothing is learnt yet
moe-hot: hot cache: 0 hits, 12 misses, hit rate 0.0 %; 0.0 MiB copied, 0 graphs made
"""
STARTS = "moe-hot: hot cache on RPC0: 6 MiB, 16 slots per layer (32 experts) in 6 layers; the profile expects 57.5 % hits\n"
ENDS = "moe-hot: hot cache: 36 hits, 12 misses, hit rate 75.0 %; 7.1 MiB copied, 27 graphs made\n"
GIVEN_UP = "moe-hot: hot cache of this model off on RPC0: a layer takes 1041 µs with it and 345 µs without; experts run on the CPU\n"
OFF_LINES = {
    "given up": GIVEN_UP,
    "device lost": "moe-hot: hot cache off on CUDA0: a copy to it failed; experts run on the CPU, answers stay the same\n",
    "never on": "moe-hot: no hot cache: 1 MiB hold 0 slots per layer\n",
    "not for these": "moe-hot: hot cache not used for batches of about 1 tokens any more: a layer takes 3 µs with it and 2 µs without\n",
}


def test_the_last_lines_of_a_cache_count():
    found = speeds.of_cache(FIRST_CONTEXT + STARTS + ENDS)
    assert not found["is_off"] and (found["mib"], found["slots"]) == (6, 16)
    assert (found["hit_rate"], found["copied_mib"], found["says"]) == (0.75, 7.1, [])


@pytest.mark.parametrize("name", OFF_LINES)
def test_a_cache_that_was_given_up_is_marked_whatever_its_hits(name):
    other = "moe-hot: something else\n"
    found = speeds.of_cache(FIRST_CONTEXT + STARTS + 3 * other + OFF_LINES[name] + ENDS)
    assert found["is_off"] and found["hit_rate"] == 0.75
    assert "moe-hot: " + found["says"][0] + "\n" == OFF_LINES[name]


@pytest.mark.parametrize("off", [True, False])
def test_a_cache_that_was_off_in_one_round_meets_no_bar(monkeypatch, tmp_path, off):
    rounds = [speeds.of_cache(STARTS + (GIVEN_UP if off else "") + ENDS), speeds.of_cache(STARTS + ENDS)]
    runs = {"cache": [{"prompt": 10.0, **run} for run in rounds], "stock": [{"prompt": 10.0}] * 2}
    monkeypatch.setattr(speeds, "in_turns", lambda *_: runs)
    bench = speeds.Bench(folder.Programs(tmp_path, None), None, models.LARGE, "RPC0", [], 0)
    (line,) = report.of_prompts(speeds.prompts(bench, None))
    assert ("OFF" in line and "the cache was off" in line and GIVEN_UP.strip()[9:] in line) == off
    assert ("met: 0.98" in line) != off and "75.0% hits" in line


def small_pack(here: Path, says: str) -> None:
    """A pack whose check only says that."""
    content = f"def main(begin):\n    print({says!r}, __file__)\n    return 0\n".encode()
    with tarfile.open(here / "pack.tar.xz", "w:xz") as archive:
        for name, inside in (("device/__init__.py", b""), ("device/check.py", content)):
            member = tarfile.TarInfo(name)
            member.size = len(inside)
            archive.addfile(member, io.BytesIO(inside))
    (here / "device-check").write_text((paths.REPOSITORY / "scripts/device/start.py").read_text())


def start(here: Path) -> subprocess.CompletedProcess:
    return run([sys.executable, here / "device-check"], cwd=here)


def test_a_pack_is_unpacked_once_and_older_ones_are_removed(tmp_path):
    small_pack(tmp_path, "one")
    first, again = start(tmp_path), start(tmp_path)
    assert first.stdout == again.stdout and first.stdout.startswith(f"one {tmp_path}/unpacked-"), first.stderr
    small_pack(tmp_path, "two")
    assert start(tmp_path).stdout.startswith(f"two {tmp_path}/unpacked-")
    assert len(list(tmp_path.glob("unpacked-*"))) == 1


def test_a_folder_that_cannot_be_written_is_no_hindrance(monkeypatch, capsys, tmp_path):
    """Whatever the reason; where nothing can be unpacked anywhere, one line says so."""
    small_pack(tmp_path, "elsewhere")
    spec = importlib.util.spec_from_file_location("start", paths.REPOSITORY / "scripts/device/start.py")
    starter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(starter)
    monkeypatch.setattr(starter, "PACK", tmp_path / "pack.tar.xz")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "device"]:
        monkeypatch.delitem(sys.modules, name)
    really = starter.unpacked

    def full(into: Path) -> Path:
        if into == tmp_path or fails_everywhere:
            raise OSError(28, "No space left on device")
        return really(into)

    monkeypatch.setattr(starter, "unpacked", full)
    fails_everywhere = True
    assert starter.main() == 2
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 2 and len(said.splitlines()) == 1
    fails_everywhere = False
    assert starter.main() == 0
    assert "elsewhere" in capsys.readouterr().out and not list(tmp_path.glob("unpacked-*"))


def test_a_pack_that_was_not_copied_whole_is_refused(tmp_path):
    small_pack(tmp_path, "one")
    (tmp_path / "pack.tar.xz").write_bytes((tmp_path / "pack.tar.xz").read_bytes()[:100])
    done = start(tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "a whole copy" in done.stderr


# One ends what it has started in a group of its own when it is asked to end; the other does not hear.
STARTERS = {
    "ends its own": "trap 'kill -9 $!; exit 1' TERM; setsid sleep 100 & echo $! >child; wait",
    "does not hear": "trap '' TERM; sleep 100 & echo $! >child; wait; wait",
}


@pytest.mark.parametrize("name", STARTERS)
def test_nothing_is_left_of_a_program_whose_time_is_over(monkeypatch, tmp_path, name):
    monkeypatch.setattr(folder, "END_S", 0.5)
    programs = folder.Programs(tmp_path, budget.Budget(budget.RESERVE_S + 1, time.monotonic()))
    with pytest.raises(budget.Skipped, match="the time for it was over"):
        programs.run(["sh", "-c", STARTERS[name]])
    child = int((tmp_path / "child").read_text())
    wait_for("it has ended", lambda: not is_running(child))


# 150.5 MiB of them are CUDA0's.
BUFFERS = """0.00.017.145 I load_tensors:        CUDA0 model buffer size =   100.00 MiB
0.00.017.146 I load_tensors:   CPU_Mapped model buffer size =  4000.00 MiB
0.00.019.221 I llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB
0.00.033.066 I sched_reserve:      CUDA0 compute buffer size =    20.00 MiB
0.00.033.067 I sched_reserve:      CUDA0 compute buffer size =    34.50 MiB
0.00.033.068 I sched_reserve:  CUDA_Host compute buffer size =     9.00 MiB
"""


def test_what_is_on_a_device_beside_experts_is_read_from_llama_cpps_lines():
    assert device_check.said_mib(BUFFERS, "CUDA0") == 150.5
    behind_a_server = BUFFERS.replace("CUDA0", "RPC0[127.0.0.1:50152]")
    assert device_check.said_mib(behind_a_server, "RPC0") == 150.5
    assert device_check.said_mib(BUFFERS, "CUDA1") == 0, "then it is estimated"


class Compares:
    """Stands for Programs: `moe-hot compare` that does by turns what it is told, and takes that long."""

    def __init__(self, work: Path, clock, does: list):
        self.work, self.clock, self.does = work, clock, does
        self.budget = budget.Budget(100 + budget.RESERVE_S, 0)
        self.vram, self.left_s = [], []

    def environment(self, **extra: object) -> dict:
        return extra

    def run(self, command: list, _: dict | None = None) -> tuple[str, str, int]:
        words = [str(word) for word in command]
        if "--help" in words:
            return "", "", 0
        if words[0].endswith("llama-completion"):
            assert "--rpc" not in words or words.index("--rpc") < words.index("--device"), "else there is no such device"
            return "", BUFFERS, 0
        assert words[words.index("--depth") + 1] == "0"
        self.vram.append(words[words.index("--vram") + 1])
        self.left_s.append(self.budget.left_s)
        self.clock.now += 10
        answer = self.does[len(self.vram) - 1]
        if isinstance(answer, Exception):
            raise answer
        output = Path(words[words.index("-o") + 1])
        output.mkdir()
        (output / "results.json").write_text(json.dumps(answer))
        return "", "", 0


REFUSAL = folder.Failed("exit code 2: …", 2, "moe-hot: --vram 27 MiB: the whole model takes 20 MiB; expected less")
BROKEN = folder.Failed("exit code 1: …", 1, "moe-hot: llama-server failed")


def compared(monkeypatch, tmp_path, does: list) -> tuple[Compares, device_check.Check]:
    programs = Compares(tmp_path, Clock(monkeypatch), does)
    (tmp_path / "m.gguf").write_bytes(b"")
    os.truncate(tmp_path / "m.gguf", models.LARGE.all_expert_bytes + (100 << 20))
    done = device_check.Check(programs.budget)
    bench = speeds.Bench(programs, tmp_path / "m.gguf", models.LARGE, "CUDA0", [], 99, 4)
    done.part("compare", 1.0, lambda: device_check.compare(bench))
    return programs, done


def test_what_compare_refuses_is_no_failure_and_other_results_are_kept(monkeypatch, tmp_path):
    programs, done = compared(monkeypatch, tmp_path, [{"complete": True}, REFUSAL, budget.Skipped("time was over")])
    part = done.parts["compare"]
    assert part["status"] == "done" and not done.has_failed
    assert [found.popitem() for found in part["result"].values()] == [
        ("results", {"complete": True}),
        ("skipped", REFUSAL.last_line),
        ("skipped", "time was over"),
    ]
    assert [vram.replace(" ", "") for vram in part["result"]] == programs.vram
    assert [round(left) for left in programs.left_s] == [33, 45, 80], "each has its part of what is left"
    assert programs.vram[1] == f"{math.ceil(150.5 + models.LARGE.all_expert_bytes / (4 << 20))}MiB"
    half, quarter, three_quarters = [int(vram.removesuffix("MiB")) for vram in programs.vram]
    assert three_quarters - half == half - quarter == models.LARGE.all_expert_bytes // 4 >> 20, "the telling one comes first"


def test_what_fails_in_compare_is_a_failure_and_other_results_are_kept(monkeypatch, tmp_path):
    _, done = compared(monkeypatch, tmp_path, [REFUSAL, BROKEN, {"complete": True}])
    part = done.parts["compare"]
    assert part["status"] == "done" and done.has_failed
    lines = report.of_compare(part["result"])
    assert "skipped: moe-hot: --vram 27 MiB" in lines[0] and "FAILED: exit code 1" in lines[1] and "done" in lines[2]


def test_a_comparison_that_is_refused_throughout_says_why(monkeypatch, tmp_path):
    _, done = compared(monkeypatch, tmp_path, [REFUSAL] * 3)
    assert done.parts["compare"]["status"] == "skipped" and not done.has_failed
    assert done.parts["compare"]["reason"].count("the whole model takes 20 MiB") == 3


def test_a_model_that_takes_too_long_is_not_made(monkeypatch, tmp_path):
    monkeypatch.setattr(models.Tensor, "write", lambda *_: time.sleep(100))
    begin = time.monotonic()
    with pytest.raises(budget.Skipped, match="time for it was over"):
        device_check.make_model(tmp_path / "m.gguf", models.SMALL, begin + 0.5)
    assert time.monotonic() - begin < 20 and not list(tmp_path.iterdir())


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.now)

    def takes(self, seconds: float):
        def round_() -> None:
            self.now += seconds

        return round_


@pytest.mark.parametrize(("takes_s", "rounds"), [(10, 4), (4, 10), (1, 10)])
def test_rounds_end_in_time(monkeypatch, takes_s, rounds):
    clock = Clock(monkeypatch)
    of_all = budget.Budget(100 + budget.RESERVE_S, 0)
    with of_all.part(0.4):
        assert of_all.repeat(clock.takes(takes_s), 2, 10) == rounds
    assert clock.now <= 40 and of_all.left_s == 100 - clock.now


def test_too_few_rounds_are_none(monkeypatch):
    clock = Clock(monkeypatch)
    of_all = budget.Budget(100 + budget.RESERVE_S, 0)
    with pytest.raises(budget.Skipped, match="30 s"), of_all.part(0.5):
        of_all.repeat(clock.takes(30), 2, 10)


@pytest.mark.parametrize("name", tensors.TYPES)
def test_weights_of_every_type_have_the_size_that_is_asked_for(name):
    size, n = 0.05, 256 * 64
    data = np.frombuffer(tensors.random_bytes(name, n, size, seed=3), np.uint8)
    kind = tensors.TYPES[name]
    assert len(data) == n // kind.weights * kind.bytes
    try:
        values = gguf.quants.dequantize(data.reshape(64, -1), gguf.GGMLQuantizationType(kind.number))
    except (NotImplementedError, ValueError) as error:
        pytest.skip(f"gguf cannot read {name}: {error}")
    assert values.shape == (64, 256) and np.isfinite(values).all()
    assert size / 2 < values.std() < 2 * size
    assert abs(values.mean()) < size / 2  # two bits are -1 to 2
