"""Rows of experts on the device against the CPU, for every type that ggml multiplies: the same small model of one layer in both,
with the same input, so that only the kernels differ."""

import array
import json
import math
from dataclasses import replace
from pathlib import Path

from device.budget import Skipped
from device.folder import BIN, PLUGIN, Failed, Programs
from device.models import ONE_LAYER, write_model
from device.tensors import TYPES

# Of the normalised mean square error: the bound of llama.cpp's own test of operations.
MOST_ERROR = 5e-4
N_TOKENS = 24
# The first batches are computed on the CPU: the cache is filled after the third.
N_BEFORE_FILL = 4
TENSOR = "ffn_moe_down"
# Those that models are mostly made of come first, in case time is short.
ORDER = sorted(
    TYPES, key=lambda name: ("Q4_K", "Q6_K", "Q8_0", "MXFP4", "IQ4_XS", "Q5_K", "Q4_0", "F16", "Q3_K", *TYPES).index(name)
)


def scenario(model: Path, **options) -> dict:
    steps = [
        {"op": "decode", "sequences": [{"id": 0, "tokens": [(7 * n + 5) % 256]}], "outputs": "all"} for n in range(N_TOKENS)
    ]
    return {"model": str(model), "steps": steps, "rows_of": TENSOR, "n_threads": 2, "n_ctx": 256, **options}


def probe(programs: Programs, folder: Path, run: dict, environment: dict[str, str]) -> tuple[array.array, str]:
    """The rows, and what was said."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    _, said, _ = programs.run([BIN / "moe-probe", folder / "run.json", folder], environment)
    return array.array("f", (folder / "rows.bin").read_bytes()), said


def error(expected: array.array, found: array.array) -> float:
    if len(expected) != len(found) or not expected:
        raise Failed(f"{len(found)} values instead of {len(expected)}")
    if not all(map(math.isfinite, found)):
        return math.inf
    return sum((b - a) ** 2 for a, b in zip(expected, found, strict=True)) / sum(a * a for a in expected)


def of_type(programs: Programs, name: str, device: str, options: dict) -> dict:
    folder = programs.work / f"rows-{name}"
    model = folder.with_suffix(".gguf")
    write_model(model, replace(ONE_LAYER, type_name=name))
    try:
        expected, _ = probe(programs, folder, scenario(model), programs.environment())
        profile = folder / "experts.json"
        n_expert = ONE_LAYER.n_expert
        layers = [{"layer": 0, "experts": [[expert, 1] for expert in range(n_expert)]}]
        profile.write_text(json.dumps({"schema": "llama.cpp.moe_layer_perf.v1", "n_expert": n_expert, "layers": layers}))
        ours = programs.environment(
            GGML_BACKEND_PATH=PLUGIN,
            LLAMA_ARG_MOE_HOT_CACHE=profile,
            LLAMA_ARG_MOE_HOT_CACHE_DEVICE=device,
            LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE=0,
            MOE_HOT_TEST_SLOTS=n_expert,
            MOE_HOT_TEST_NO_GUARD=1,
            MOE_HOT_TEST_WAIT=1,
        )
        found, said = probe(programs, folder, scenario(model, **options), ours)
    finally:
        model.unlink()
    lines = [line.split("moe-hot: ", 1)[1] for line in said.splitlines() if "moe-hot: " in line]
    hits = next((int(line.split(" hits")[0].split()[-1]) for line in lines if " hits, " in line), 0)
    if not hits:
        return {
            "skipped": next(
                (line for line in lines if "layer" in line or "computes on the CPU" in line), "nothing was computed there"
            )[:200]
        }
    per_token = len(expected) // N_TOKENS
    of_device = error(expected[N_BEFORE_FILL * per_token :], found[N_BEFORE_FILL * per_token :])
    return {"error": of_device, "hits": hits, "passed": of_device <= MOST_ERROR}


def measure(programs: Programs, device: str, options: dict) -> dict:
    """Per type: the error, or why there is none. `options`: moe-probe's, that make the device known to it."""
    types: dict[str, dict] = {}
    for name in ORDER:
        try:
            types[name] = of_type(programs, name, device, options)
        except Skipped as reason:
            types |= {left: {"skipped": f"no time left: {reason}"} for left in ORDER if left not in types}
            break
        except Failed as reason:
            types[name] = {"failed": str(reason)}
    failed = [name for name, found in types.items() if "failed" in found or found.get("passed") is False]
    checked = [name for name, found in types.items() if "error" in found]
    if not checked and not failed:
        raise Skipped(f"no type was computed on the device: {types[ORDER[0]]['skipped']}")
    return {"types": types, "checked": len(checked), "failed_types": failed, "most_error": MOST_ERROR}
