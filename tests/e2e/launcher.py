"""Runs the launcher, on real programs and on `fake` ones.

`fake` programs are scripts that say what llama.cpp programs say to --version and --help and print their arguments and
environment instead of working.
"""

import json
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paths import LAUNCHER
from processes import HANG_S, stock_environment

OUR_VERSION = "version: 0.5.0-dev (build 11312, commit 0c1e57098)"
SERVER_HELP = "-cmoe, --cpu-moe   keep all experts in the CPU\n-ncmoe, --n-cpu-moe N   of the first N layers"


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def started(self) -> dict:
        """What the fake program was started with."""
        return json.loads(self.out)


def launch(*args, cwd: Path | None = None, launcher: Path = LAUNCHER, **environment: str) -> Answer:
    done = subprocess.run(
        [str(word) for word in (launcher, *args)],
        env=stock_environment(**environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def write_fake(path: Path, version: str = OUR_VERSION, help_text: str = SERVER_HELP, devices: str = "") -> Path:
    path.write_text(f"""#!/usr/bin/env python3
import json, os, sys
if sys.argv[1:] == ["--version"]: print({version!r}, file=sys.stderr)
elif sys.argv[1:] == ["--help"]: print({help_text!r})
elif sys.argv[-1:] == ["--list-devices"]: print({devices!r}, *sys.argv[1:-1])
else: print(json.dumps({{"args": sys.argv[1:], "environment": dict(os.environ)}}))
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def assert_refused(answer: Answer, *said: str) -> None:
    """Exit code 2 and one line that says all this."""
    assert answer.code == 2 and answer.out == "", answer
    lines = answer.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("moe-hot: "), answer.err
    for part in said:
        assert part in lines[0]
