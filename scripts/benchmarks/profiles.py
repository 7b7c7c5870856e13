"""How long profiles and traces take: a profile of a large model is read, read and written, against a start of moe-hot that does
nothing; and recorded routing is replayed by each policy, against LRU."""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT, programs
from benchmarks.pairs import in_turns, ratio, shown

import paths

HELP = "reading and writing profiles, replaying policies"
SCHEMA = "llama.cpp.moe_layer_perf.v1"
# Of Qwen3-30B-A3B, and of the largest models that are served.
N_LAYERS, N_EXPERT = 48, 512
POLICIES = ("lru", "lfu", "blend", "default", "belady")
SLOTS = 8


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def write_profile(path: Path) -> None:
    chooser = random.Random(1)
    layers = [
        {"layer": layer, "experts": [[expert, chooser.randrange(1, 10**6)] for expert in range(N_EXPERT)]}
        for layer in range(N_LAYERS)
    ]
    path.write_text(json.dumps({"schema": SCHEMA, "n_expert": N_EXPERT, "n_expert_used": 8, "layers": layers}))


def measure(args: argparse.Namespace) -> dict:
    print("profiles: all runs of a round in turns", file=sys.stderr)
    traces = sorted((ROOT / "tests/traces").glob("*.trace"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile, output = folder / "experts.json", folder / "again.json"
        write_profile(profile)

        def timed(*command: object) -> dict:
            begin = time.monotonic()
            printed, _ = programs.run([paths.LAUNCHER, *command], programs.environment(), folder)
            return {"seconds": time.monotonic() - begin, "printed": printed}

        def written() -> dict:
            output.unlink(missing_ok=True)
            return timed("merge", profile, profile, "-o", output)

        files = {
            "start": lambda: timed("--version"),
            "read": lambda: timed("inspect", profile),
            "read twice and write": written,
        }
        taken = in_turns(files, args.pairs)

        def played(policy: str) -> dict:
            run = timed("replay", *traces, "--slots", SLOTS, "--policy", policy, "--json", "-")
            rows = json.loads(run["printed"])
            return {"seconds": run["seconds"], "hit": sum(row["hit"] for row in rows) / len(rows)}

        replayed = in_turns({policy: lambda policy=policy: played(policy) for policy in POLICIES}, args.pairs)
        size = profile.stat().st_size
    results = {what: ratio(taken, what, "start", "seconds") for what in ("read", "read twice and write")}
    policies = {
        policy: {"hit": replayed[policy][0]["hit"], **ratio(replayed, policy, "lru", "seconds")}
        for policy in POLICIES
        if policy != "lru"
    }
    return {
        "pairs": args.pairs,
        "profile_bytes": size,
        "results": results,
        "replay": {
            "traces": [trace.name for trace in traces],
            "slots": SLOTS,
            "lru_hit": replayed["lru"][0]["hit"],
            "policies": policies,
        },
    }


def report(measured: dict) -> None:
    print(f"profile of {N_LAYERS} layers of {N_EXPERT} experts, {measured['profile_bytes']} bytes")
    for what, r in measured["results"].items():
        own = next(value for name, value in r.items() if name.endswith("_median") and not name.startswith("start"))
        print(f"{what} / a start that does nothing: {shown(r)}; {1000 * own:.1f} and {1000 * r['start_median']:.1f} ms")
    replay = measured["replay"]
    for policy, r in replay["policies"].items():
        print(
            f"replay at {SLOTS} slots, {policy}: hits {r['hit']:.3f}, LRU {replay['lru_hit']:.3f}; time / LRU's: {shown(r)}"
        )


def missed_bars(_: dict) -> list[str]:
    """None: hits are pinned by tests, and no time was promised."""
    return []
