"""The check of a machine with a GPU: all parts in order, within the time given; a table, and results.json beside it.

A part that does not fit into what is left of the time is skipped and says so; it never counts as passed. Exit code: 0 if nothing
failed, 1 if something did, 2 if it could not begin."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from device import conformance, copies, machine, models, report, routing, rows, speeds
from device.budget import Budget, Skipped
from device.folder import BIN, Failed, Programs

SCHEMA = "moe-hot.device-check.v1"
MINUTES = 8.0
MIB = 1 << 20
# What stays free on the disk, and of the memory, beside the model.
SPARE_MIB = 2048
# Of `moe-hot compare`: what fits in the time of one part, its exit code for what it refuses, and the context of its server.
COMPARED_ARMS = ("n-cpu-moe", "hot-fixed", "hot-profile")
N_ANSWER = 32
REFUSED = 2
N_CONTEXT = 8192
SIZES = {"large": models.LARGE, "small": models.SMALL}


class Check:
    """Runs parts and keeps what they found."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.parts: dict[str, dict] = {}

    def part(self, name: str, share: float, run: Callable[[], dict]) -> dict | None:
        """A part that may use that share of what time is left; None if it has no result."""
        begin = time.monotonic()
        print(f"[{self.budget.spent_s:4.0f} s] {name}", file=sys.stderr, flush=True)
        try:
            with self.budget.part(share):
                found = {"status": "done", "result": run()}
        except Skipped as reason:
            found = {"status": "skipped", "reason": str(reason)}
        except Failed as reason:
            found = {"status": "failed", "reason": str(reason)}
        except Exception as error:  # one part must not take the others with it
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        self.parts[name] = found | {"seconds": round(time.monotonic() - begin, 1)}
        return found.get("result")

    def skip(self, names: tuple[str, ...], reason: str) -> None:
        self.parts |= {name: {"status": "skipped", "reason": reason, "seconds": 0} for name in names}

    @property
    def has_failed(self) -> bool:
        failed_rows = self.parts.get("rows", {}).get("result", {}).get("failed_types")
        compared = self.parts.get("compare", {}).get("result", {}).values()
        has_failed = any(part["status"] == "failed" for part in self.parts.values())
        return has_failed or bool(failed_rows) or any("failed" in one for one in compared)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device-check", description="Checks and measures moe-hot on this machine's GPU.")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="the device, as llama.cpp names it; the first GPU unless given; RPC0: the processor, behind llama.cpp's RPC server",
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for all of it, {MINUTES:.0f}")
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="large",
        help="of the generated model's layers: large (those of Qwen3-30B-A3B) or small",
    )
    parser.add_argument("--layers", type=int, help="so many of them (large: 12, 4 GiB)")
    parser.add_argument("--n-gpu-layers", type=int, default=99, help="layers whose dense weights are on the device, all")
    parser.add_argument(
        "--no-guard", action="store_true", help="keep a cache that loses, as it does on RPC0: to try this script"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write one file to send: without names, folders and addresses of this machine",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="folder for results.json, the current one"
    )
    args = parser.parse_args()
    if args.minutes <= 0 or (args.layers is not None and args.layers < 1):
        parser.error("--minutes and --layers: expected more than 0")
    return args


def make_model(path: Path, sizes: models.Sizes, end: float) -> dict:
    """Until `end`, of time.monotonic."""
    wanted, free = sizes.all_expert_bytes // MIB, shutil.disk_usage(path.parent).free // MIB
    if wanted + SPARE_MIB > free:
        raise Skipped(f"the model takes {wanted} MiB; {free} MiB are free: give fewer --layers, or another folder by TMPDIR")
    if wanted + SPARE_MIB > machine.memory_mib():
        raise Skipped(
            f"the model takes {wanted} MiB; this machine has {machine.memory_mib()} MiB of memory: give fewer --layers"
        )
    begin = time.monotonic()
    try:
        models.write_model(path, sizes, end=end)
    except TimeoutError as error:
        path.unlink()
        raise Skipped(f"the model of {wanted} MiB was not whole when the time for it was over: give fewer --layers") from error
    made = {
        "layers": sizes.n_layer,
        "experts": sizes.n_expert,
        "experts_per_token": sizes.n_expert_used,
        "type": sizes.type_name,
    }
    shape = {"n_embd": sizes.n_embd, "n_ff": sizes.n_ff, "expert_bytes": sizes.expert_bytes, "experts_mib": wanted}
    return made | shape | {"routing": dataclasses.asdict(models.MIX), "seconds": time.monotonic() - begin}


def beside_experts_mib(bench: speeds.Bench) -> float:
    """What stock has on the device without any expert, with the context of `moe-hot compare`'s server: as llama.cpp says it
    when it loads the model, else an estimate."""
    servers = ["--rpc", bench.arguments[-1]] if bench.arguments else []  # first: they make the device known
    command = [BIN / "llama-completion", *servers, "-m", bench.model, "-c", N_CONTEXT, "-n", 1, "-p", "a", "-no-cnv", "--no-warmup"]
    command += ["--fit", "off", "-ngl", 99, "--cpu-moe", "--no-repack", "--device", bench.device, "-lv", 4]
    _, said, _ = bench.programs.run(command)
    return said_mib(said, bench.device) or estimated_mib(bench)


def said_mib(said: str, device: str) -> float:
    """Of all buffers there; a scratch buffer that is made anew takes the place of the one before."""
    sizes: dict[str, list[float]] = {}
    for kind, mib in re.findall(rf" {device}(?:\[\S*\])? +(.+?) buffer size = +([\d.]+) MiB", said):
        sizes.setdefault(kind, []).append(float(mib))
    return sum(max(of_kind) if kind == "compute" else sum(of_kind) for kind, of_kind in sizes.items())


def estimated_mib(bench: speeds.Bench) -> float:
    """An estimate of what stock has on the device without any expert: dense weights, keys and values, one layer's experts (they
    are copied there for a prompt) and what a prompt's tokens need."""
    sizes = bench.sizes
    dense = bench.model.stat().st_size - sizes.all_expert_bytes
    context = N_CONTEXT * sizes.n_layer * 2 * sizes.n_head_kv * sizes.head_dim * 2
    scratch = 16 * speeds.N_PROMPT * sizes.n_embd * 4
    return (dense + context + sizes.n_expert * sizes.expert_bytes + scratch) / MIB


def compare(bench: speeds.Bench) -> dict:
    """`moe-hot compare` in so much device memory that about a share of the experts fits, by MiB; its own files say the rest. The
    telling share comes first. All of them would be the whole model, which it refuses."""
    command = [BIN / "moe-hot", "compare"]
    try:
        bench.programs.run([*command, "--help"])
    except Failed as error:
        raise Skipped("this moe-hot has no such command") from error
    same = ["-m", bench.model, "--device", bench.device, "--pp", speeds.N_PROMPT, "--tg", speeds.N_DECODE, "--depth", 0]
    same += ["--pairs", speeds.LEAST_ROUNDS, "-c", N_CONTEXT, "--arms", ",".join(COMPARED_ARMS), "--answer", N_ANSWER]
    same += ["--threads", bench.threads] if bench.threads else []
    same += ["--rpc", bench.arguments[-1]] if bench.arguments else []
    found: dict[str, dict] = {}
    shares = sorted((share for share in speeds.SHARES if share < 1), key=lambda share: share != speeds.TELLING)
    beside = beside_experts_mib(bench)
    for number, share in enumerate(shares):
        vram = math.ceil(beside + share * bench.sizes.all_expert_bytes / MIB)
        output = bench.programs.work / f"compare-{vram}"
        try:
            with speeds.narrowed(bench.budget, len(shares) - number):
                arguments = [*same, "--vram", f"{vram}MiB", "-o", output]
                bench.programs.run([*command, *arguments], bench.programs.environment(**bench.tests))
            found[f"{vram} MiB"] = {"results": json.loads((output / "results.json").read_text())}
        except Skipped as reason:
            found[f"{vram} MiB"] = {"skipped": str(reason)}
        except Failed as failure:
            refused = failure.code == REFUSED
            found[f"{vram} MiB"] = {"skipped": failure.last_line} if refused else {"failed": str(failure)}
    if all("skipped" in one for one in found.values()):
        raise Skipped("; ".join(f"{vram}: {one['skipped']}" for vram, one in found.items()))
    return found


def of_model(check: Check, bench: speeds.Bench, sizes: models.Sizes) -> None:
    """The parts that want the generated model."""
    after = ("routing", "threads", "cache", "prompts", "compare", "layers", "overhead", "copies")
    if not check.part("model", 0.4, lambda: make_model(bench.model, sizes, check.budget.part_end)):
        check.skip(after, "there is no model to measure with")
        return
    found: dict[str, Path] = {}

    def route() -> dict:
        statistics, found["profile"] = routing.measure(bench.programs, bench.command())
        return statistics

    check.part("routing", 0.25, route)
    tuned = check.part("threads", 0.15, lambda: speeds.tune(bench))
    bench = dataclasses.replace(bench, threads=tuned["threads"] if tuned else 0)
    if "profile" in found:
        check.part("cache", 0.4, lambda: speeds.cache(bench, found["profile"]))
        check.part("prompts", 0.3, lambda: speeds.prompts(bench, found["profile"]))
    else:
        check.skip(("cache", "prompts"), "there is no profile: routing was not recorded")
    check.part("compare", 0.6, lambda: compare(bench))
    if "profile" in found:
        check.part("layers", 0.35, lambda: speeds.layers(bench, found["profile"]))
    else:
        check.skip(("layers",), "there is no profile: routing was not recorded")
    check.part("overhead", 0.4, lambda: speeds.overhead(bench))
    if copies.can_be_measured(bench.device):
        check.part("copies", 0.7, lambda: copies.measure(bench))
    else:
        check.skip(("copies",), f"only through the CUDA driver; the device is {bench.device}")


def run(args: argparse.Namespace, work: Path, budget: Budget) -> dict:
    programs = Programs(work, budget)
    check = Check(budget)
    sizes = SIZES[args.size]
    sizes = dataclasses.replace(sizes, n_layer=args.layers or sizes.n_layer)
    is_remote = (args.device or "").startswith("RPC")
    n_threads = max(1, len(os.sched_getaffinity(0)) // 2)
    with programs.server(n_threads) if is_remote else contextlib.nullcontext() as endpoint:
        known = ["-rpc", endpoint] if endpoint else []
        device = machine.choose(programs, args.device, known)
        about = machine.about(programs, device)
        check.part("conformance", 0.2, lambda: conformance.measure(programs, device.name, endpoint))
        check.part("rows", 0.25, lambda: rows.measure(programs, device.name, {"rpc": endpoint} if endpoint else {}))
        tests = {"MOE_HOT_TEST_NO_GUARD": 1} if args.no_guard else {}
        bench = speeds.Bench(programs, work / "generated.gguf", sizes, device.name, known, args.n_gpu_layers, tests=tests)
        of_model(check, bench, sizes)
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "command": report.shown_command(sys.argv[1:]),
        "minutes": args.minutes,
        "guard": not args.no_guard,
        "seconds": round(budget.spent_s, 1),
        "machine": about,
        "parts": check.parts,
        "has_failed": check.has_failed,
    }


def main(begin: float) -> int:
    """`begin`: since when the time counts, of time.monotonic."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="moe-hot-device-") as work:
        try:
            results = run(args, Path(work), Budget(60 * args.minutes, begin))
        except (Failed, Skipped) as reason:
            print(f"device-check: {reason}", file=sys.stderr)
            return 2
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(report.table(results))
    if args.report:
        report.write_report(args.report, results)
        print(
            f"\n{args.report} can be sent: it has no names, folders or addresses of this machine. Look at it first.",
            file=sys.stderr,
        )
    return 1 if results["has_failed"] else 0
