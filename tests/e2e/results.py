"""Rows for the table in docs/models.md: what a test has shown, written down once all its assertions have passed.

    record_result(shape="qwen3moe", type="Q4_K", way="--cpu-moe", outcome="equal", detail="")

Call it as the last line of a test. `shape` is the name of a generated model's architecture or variant, `type` that of
its expert weights ("Q4_K"). `way` is how the experts came to the plugin, in the words a user would type
("--cpu-moe", "-ot", "--fit", "--load-mode none", "--cpu-moe, dense on RPC"). `outcome` is one of OUTCOMES: "equal" (the
plugin computed, bits are stock's) or "declined" (stock computed, bits are stock's); `detail` says why it declined, or
what else the row needs ("" as a rule).

One JSON object per line, with these five keys, in build/tests/results/<start time, seconds>-<process id>.jsonl, one
file per test run. When the run ends, conftest.py adds a last line {"run": {"whole": bool, "passed": n, "failed": n}};
`whole` says that it was all of tests/e2e with --full. tests/table/models_table.py takes the newest whole run.
"""

import json
import os
import time

from paths import REPOSITORY
from revision import backend_api, build_number

OUTCOMES = ("equal", "declined")
RESULTS = REPOSITORY / "build/tests/results"
BUILDS = REPOSITORY / "build/tests/builds"
FILE = RESULTS / f"{int(time.time())}-{os.getpid()}.jsonl"


def record_result(shape: str, type: str, way: str, outcome: str, detail: str = "") -> None:
    assert outcome in OUTCOMES, outcome
    assert outcome == "equal" or detail, "a row that says declined says why"
    append({"shape": shape, "type": type, "way": way, "outcome": outcome, "detail": detail})


def record_run(whole: bool, passed: int, failed: int) -> None:
    """Nothing, if there are no rows."""
    if FILE.exists():
        append({"run": {"whole": whole, "passed": passed, "failed": failed}})


def append(entry: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(FILE, "a") as file:
        file.write(json.dumps(entry) + "\n")


def record_build(files: dict[str, list[int]]) -> None:
    """For the table in docs/revisions.md (tests/table/revisions_table.py), where MOE_HOT_RECORD_BUILD is 1: with which
    llama.cpp this run was, and how many tests of each file passed and failed."""
    if os.environ.get("MOE_HOT_RECORD_BUILD") != "1" or not files:
        return
    BUILDS.mkdir(parents=True, exist_ok=True)
    row = {"build": build_number(), "api": backend_api(), "files": files}
    (BUILDS / f"{FILE.stem}.json").write_text(json.dumps(row))
