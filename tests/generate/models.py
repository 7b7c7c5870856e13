"""Small random-weight MoE models for tests, the same bytes from the same seed.

`python tests/generate/models.py` writes all of them to build/tests/models; tests call `generated()`, which makes
one when it is first wanted. F16 is written here, other types come from llama-quantize. A further architecture is
one function in architectures/ that adds its keys and tensors to a writer, and one line in ARCHITECTURES.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np

from architectures import ARCHITECTURES
from blocks import TYPICAL_SCALE, BlockWriter
from lora import write_lora
from writer import finish

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LLAMA_QUANTIZE = REPOSITORY / "build/stock/bin/llama-quantize"
MODELS = REPOSITORY / "build/tests/models"

QUANTIZED = ["Q4_0", "Q4_K", "Q6_K", "Q8_0"]
EXPERTS = "experts-"
SPLIT_MAX_TENSORS = 14  # 39 tensors: three files
SEED = 1
SOURCES = ["writer.py", "lora.py", "blocks.py"]  # what every model depends on
LORA_SEEDS = {"lora": SEED, "another-lora": SEED + 1}
QUANTIZE_TIMEOUT_S = 300
STALE_S = 24 * 3600


def write_f16(architecture: str, path: Path, split_max_tensors: int = 0) -> None:
    """Writes `path`, or, when split, files named as llama.cpp wants them beside it."""
    write(architecture, gguf.GGUFWriter(path, ARCHITECTURES[architecture].name, split_max_tensors=split_max_tensors))


def write(architecture: str, writer: gguf.GGUFWriter) -> None:
    writer.add_name(f"random {architecture}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    ARCHITECTURES[architecture].add(writer, SEED)
    finish(writer)


def run_quantize(arguments: list) -> None:
    command = [str(LLAMA_QUANTIZE), *map(str, arguments), "2"]
    environment = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    done = subprocess.run(command, env=environment, timeout=QUANTIZE_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode != 0:
        output = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{output}")


def quantize(source: Path, path: Path, type_name: str) -> None:
    """Every matrix of that type."""
    run_quantize(["--pure", source, path, type_name])


def write_experts(architecture: str, source: Path, path: Path, type_name: str) -> None:
    """Expert matrices of that type (any of ggml's); the others as in `source`, or Q8_0."""
    if type_name in TYPICAL_SCALE:
        write(architecture, BlockWriter(path, ARCHITECTURES[architecture].name, type_name, SEED))
    else:
        quantize_experts(source, path, type_name)


def quantize_experts(source: Path, path: Path, type_name: str) -> None:
    imatrix = path.with_name(f"{path.name}.imatrix")
    write_imatrix(source, imatrix)
    run_quantize(["--tensor-type", f"_(ch)?exps={type_name.lower()}", "--imatrix", imatrix, source, path, "Q8_0"])
    imatrix.unlink()


def write_imatrix(model: Path, path: Path) -> None:
    """An importance matrix that calls all columns equally important; the smallest types want one."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    for tensor in gguf.GGUFReader(model).tensors:
        n_in, _, n_matrices = (*map(int, tensor.shape), 1)[:3] if len(tensor.shape) > 1 else (0, 0, 0)
        if n_in:
            writer.add_tensor(f"{tensor.name}.in_sum2", np.ones((n_matrices, n_in), np.float32))
            writer.add_tensor(f"{tensor.name}.counts", np.ones((n_matrices, 1), np.float32))
    finish(writer)


def sources_of(architecture: str) -> list[Path]:
    """The files that decide what its models hold: of its writer, and of the functions that this one uses."""
    users = vars(inspect.getmodule(ARCHITECTURES[architecture].add)).values()
    used = {Path(inspect.getsourcefile(function)) for function in users if inspect.isfunction(function)}
    return sorted(used | {HERE / name for name in SOURCES})


def cache_folder(architecture: str) -> Path:
    """The folder for what these very sources make; what other versions of them made is removed when a day old."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources_of(architecture))).hexdigest()[:12]
    folder = MODELS / architecture / digest
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        if other != folder and time.time() - other.stat().st_mtime > STALE_S:
            shutil.rmtree(other)
    return folder


def make(folder: Path, architecture: str, variant: str) -> Path:
    path = folder / f"{architecture}-{variant}.gguf"
    if variant == "split":
        first = folder / f"{architecture}-{variant}-00001-of-00003.gguf"
        if not first.exists():
            write_f16(architecture, path, SPLIT_MAX_TENSORS)
        return first
    if path.exists():
        return path
    partial = folder / f"partial-{path.name}"
    if variant == "F16":
        write_f16(architecture, partial)
    elif variant in LORA_SEEDS:
        write_lora(make(folder, architecture, "F16"), partial, LORA_SEEDS[variant])
    elif variant.startswith(EXPERTS):
        write_experts(architecture, make(folder, architecture, "F16"), partial, variant.removeprefix(EXPERTS))
    else:
        quantize(make(folder, architecture, "F16"), partial, variant)
    partial.rename(path)
    return path


def generated(variant: str, architecture: str = "qwen3moe") -> Path:
    """The model of that variant of one of ARCHITECTURES: "F16"; a type of QUANTIZED, for all matrices;
    "experts-TYPE", for those of the experts alone; "split", F16 in three files, the first of which is returned;
    or "lora" and "another-lora", adapters of the same shape for all of them."""
    folder = cache_folder(architecture)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make(folder, architecture, variant)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for architecture in sorted(name for name in ARCHITECTURES if "bench" not in name):  # which take up to 1 GiB
        variants = ["F16", *QUANTIZED, "split"] if architecture == "qwen3moe" else ["F16"]
        for variant in variants:
            path = generated(variant, architecture)
            print(f"{path.relative_to(REPOSITORY)}  {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
