"""Rows for the table in docs/models.md: what a test has shown, written down once all its assertions have passed.

    record_result(shape="qwen3moe", type="Q4_K", way="--cpu-moe", outcome="equal", detail="")

Call it as the last line of a test. `shape` is the name of a generated model's architecture or variant, `type` that of
its expert weights ("Q4_K"; "F16+MXFP4" is not wanted: name the type of the gate and up projection). `way` is how the
experts came to the plugin, in the words a user would type ("--cpu-moe", "-ot", "--fit", "--load-mode none",
"--cpu-moe, dense on RPC"). `outcome` is one of OUTCOMES: "equal" (the plugin computed, bits are stock's) or "declined"
(stock computed, bits are stock's); `detail` says why it declined, or what else the row needs ("" as a rule).

One JSON object per line, with these five keys, in build/tests/results/<start time, seconds>-<process id>.jsonl, one file per
test run. tests/table/models_table.py reads all files; of rows with equal shape, type and way the newest one counts.
"""

import json
import os
import time

from paths import REPOSITORY

OUTCOMES = ("equal", "declined")
RESULTS = REPOSITORY / "build/tests/results"
FILE = RESULTS / f"{int(time.time())}-{os.getpid()}.jsonl"


def record_result(shape: str, type: str, way: str, outcome: str, detail: str = "") -> None:
    assert outcome in OUTCOMES, outcome
    assert outcome == "equal" or detail, "a row that says declined says why"
    row = {"shape": shape, "type": type, "way": way, "outcome": outcome, "detail": detail}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(FILE, "a") as file:
        file.write(json.dumps(row) + "\n")
