"""Runs the launcher, on real programs and on `fake` ones.

`fake` programs are scripts that say what llama.cpp programs say to --version and --help and print their arguments and
environment instead of working.
"""

import json
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paths import LAUNCHER
from processes import HANG_S, stock_environment

OUR_VERSION = "version: 0.5.0-dev (build 11312, commit 0c1e57098)"
SERVER_HELP = """\
-h,    --help, --usage                  print usage and exit
-p,    --prompt PROMPT                  prompt to start generation with
--no-host                               bypass host buffer
                                        (env: LLAMA_ARG_NO_HOST)
--rpc SERVERS                           comma-separated list of RPC servers (host:port)
                                        (env: LLAMA_ARG_RPC)
-dev,  --device <dev1,dev2,..>          comma-separated list of devices
                                        (env: LLAMA_ARG_DEVICE)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
                                        (env: LLAMA_ARG_OVERRIDE_TENSOR)
-cmoe, --cpu-moe                        keep all experts in the CPU
                                        (env: LLAMA_ARG_CPU_MOE)
-ncmoe, --n-cpu-moe N                   of the first N layers
                                        (env: LLAMA_ARG_N_CPU_MOE)
--spec-draft-override-tensor, -otd, --override-tensor-draft <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type for draft model
--spec-draft-n-cpu-moe, --spec-draft-ncmoe, -ncmoed, --n-cpu-moe-draft N
                                        of the first N layers of the draft model
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-hf,   -hfr, --hf-repo <user>/<model>[:quant]
                                        (env: LLAMA_ARG_HF_REPO)
--models-preset PATH                    path to INI file containing model presets for the router server
                                        (env: LLAMA_ARG_MODELS_PRESET)
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to"""
FIT_HELP = f"""{SERVER_HELP}
-fit,  --fit [on|off]                   whether to adjust unset arguments
                                        (env: LLAMA_ARG_FIT)
-fitt, --fit-target MiB0,MiB1,MiB2,...
                                        (env: LLAMA_ARG_FIT_TARGET)
--list-devices                          print list of available devices and exit"""
BENCH_HELP = """\
usage: llama-bench [options]

  -fitt, --fit-target <MiB>                   fit model to device memory
  -rpc, --rpc <rpc_servers>                   register RPC devices (comma separated)
  --list-devices                              list available devices and exit
  -m, --model <filename>                            (default: x)
  -ncmoe, --n-cpu-moe <n>                           (default: 0)
  -ot --override-tensor <tensor name pattern>=<buffer type>;...
  --no-host <0|1>                                   (default: 0)"""


PRINT_START = 'import json, os, sys; print(json.dumps({"args": sys.argv[1:], "environment": dict(os.environ)}))'


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
        [word if isinstance(word, bytes) else str(word) for word in (launcher, *args)],
        env=stock_environment(**{"XDG_CONFIG_HOME": "/nonexistent"} | environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def write_fake(
    path: Path, version: str = OUR_VERSION, help_text: str = SERVER_HELP, devices: str = "", asked: Path | None = None
) -> Path:
    """`asked`: where the questions are written that it gets, their words parted by `|`."""
    answers = {"--version": version, "--help": help_text, "--list-devices": devices}
    cases = "\n".join(f"{question}) note \"$@\"; cat <<'END'\n{text}\nEND\n;;" for question, text in answers.items())
    return write_script(
        path,
        f"""
note() {{ IFS='|'; echo "$*" >> "{asked or "/dev/null"}"; }}
for last; do :; done
case "$last" in
{cases}
*) exec "{sys.executable}" -Sc '{PRINT_START}' "$@" ;;
esac
""",
    )


def write_script(path: Path, text: str, shell: str = "/bin/sh") -> Path:
    path.write_text(f"#!{shell}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_config(folder: Path, text: str) -> dict[str, str]:
    """The environment in which a program reads this configuration file."""
    (folder / "llama.cpp").mkdir(exist_ok=True)
    (folder / "llama.cpp/config.ini").write_text(text)
    return {"XDG_CONFIG_HOME": str(folder)}


def assert_refused(answer: Answer, *said: str) -> None:
    """Exit code 2 and one line that says all this."""
    assert answer.code == 2 and answer.out == "", answer
    lines = answer.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("moe-hot: "), answer.err
    for part in said:
        assert part in lines[0]
