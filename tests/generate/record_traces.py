"""Records tests/traces/*.trace: the shipped model's routing on three kinds of text and on one with a switch of kind.

And golden_shipped.json: what `moe-hot replay` makes of them. `build/venv/bin/python tests/generate/record_traces.py`,
then look at what has changed.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = REPOSITORY / "tests/models/text"
OUT = REPOSITORY / "tests/traces"
N_BYTES = {"prose": 1500, "code": 1000, "manual": 1200}  # a few hundred tokens each
LAUNCHER = REPOSITORY / "target/release/moe-hot"
KINDS = {**{kind: [kind] for kind in N_BYTES}, "switch": ["prose", "code"]}


def record(name: str, kinds: list[str]) -> None:
    text = "".join((TEXTS / f"{kind}.txt").read_text()[5000 : 5000 + N_BYTES[kind]] for kind in kinds)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        program = ["llama-completion", "-m", REPOSITORY / "tests/models/moe-small.gguf", "-f", file.name]
        token_by_token = ["-ub", 1, "-c", 4096, "-n", 2, "--temp", 0, "-no-cnv", "--no-warmup", "-t", 1]
        command = [LAUNCHER, *program, *token_by_token]
        command += ["--moe-trace-out", OUT / f"{name}.trace"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)


def golden() -> None:
    traces = [str(OUT / f"{name}.trace") for name in sorted(KINDS)]
    command = [str(LAUNCHER), "replay", "--json", "-", "--slots", "8,16", "--lag", "0,4", *traces]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    lines = [json.dumps(row | {"trace": Path(row["trace"]).name}) for row in rows]
    (OUT / "golden_shipped.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    for name, kinds in KINDS.items():
        record(name, kinds)
        print(name, (OUT / f"{name}.trace").stat().st_size, "bytes")
    golden()
