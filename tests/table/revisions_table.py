"""Writes the table in docs/revisions.md from what test runs recorded (`record_build` in tests/e2e/results.py).

    scripts/test all revisions && scripts/revisions-table

Of each build, and for each column, the newest run counts that ran all its files. `scripts/test` records the pinned build,
`scripts/test revisions` the last one that is served.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from models_table import NOT_TESTED, machine, markdown_table

REPOSITORY = Path(__file__).resolve().parents[2]
BUILDS = REPOSITORY / "build/tests/builds"
PAGE = REPOSITORY / "docs/revisions.md"
BEGIN, END = "<!-- table, by scripts/revisions-table -->", "<!-- end of table -->"

# What a column says, and the files of tests that say it.
COLUMNS = {
    "equality": ["test_contracts", "test_equality", "test_inert"],
    "hot lane": ["test_fake_device", "test_hot_shapes", "test_hot_steady", "test_hot_rpc"],
    "server, through the launcher": ["test_server"],
    "patch": ["test_patched", "test_patched_http"],
}


def cell(runs: list[dict], files: list[str]) -> str:
    """`runs`: those of one build, oldest first."""
    run = next((run for run in reversed(runs) if all(name in run["files"] for name in files)), None)
    if run is None:
        return NOT_TESTED
    passed, failed = (sum(run["files"][name][index] for name in files) for index in (0, 1))
    return f"{failed} of {passed + failed} fail" if failed else f"{passed} pass"


def main() -> int:
    paths = sorted(BUILDS.glob("*.json"))
    if not paths:
        sys.exit("revisions-table: no run in build/tests/builds; expected one: run scripts/test all revisions first")
    runs = [json.loads(path.read_text()) for path in paths]
    rows = []
    for build, api in sorted({(run["build"], run["api"]) for run in runs}):
        own = [run for run in runs if run["build"] == build]
        rows.append([f"b{build} (API {api})", *(cell(own, files) for files in COLUMNS.values())])
    day = datetime.fromtimestamp(int(paths[-1].stem.split("-")[0]), UTC)
    lines = [
        BEGIN,
        *markdown_table(["llama.cpp", *COLUMNS], rows),
        "",
        "How many tests pass in each, with the same plugin file (`scripts/test all revisions`, then `scripts/revisions-table`;",
        f"{machine()}, {day:%Y-%m-%d}). Of the last build a part of the tests is run: `scripts/test` says which.",
        END,
    ]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + "\n".join(lines) + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
