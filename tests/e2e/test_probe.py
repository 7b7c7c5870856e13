"""moe-probe itself: a run that cannot be right is refused with one clear line and exit code 2."""

import json
import subprocess

import pytest

import paths
from models import generated
from processes import HANG_S, stock_environment

BAD_RUNS = {
    "no JSON": ("{", "parse error"),
    "no model": ({"steps": []}, "key 'model' not found"),
    "a missing file": ({"model": "nowhere.gguf", "steps": []}, "no model file nowhere.gguf"),
    "an unknown step": ({"steps": [{"op": "dance"}]}, 'unknown op "dance"'),
    "a context too many": ({"steps": [{"op": "greedy", "context": 1}]}, "step uses context 1 of 1"),
    "a model too many": ({"steps": [{"op": "load", "model": 1}]}, "step uses model 1 of 1"),
    "an unloaded context": ({"steps": [{"op": "unload", "model": 0}, {"op": "greedy"}]}, "which is unloaded"),
    "no output to go on from": ({"steps": [{"op": "greedy", "sequences": [0], "n": 1}]}, "no output yet"),
    "an unknown load mode": ({"load_mode": "guess", "steps": []}, 'load_mode is "guess"'),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_runs_are_refused(tmp_path, name):
    run, message = BAD_RUNS[name]
    if isinstance(run, dict) and name != "no model":
        run = {"model": str(generated("Q4_K"))} | run
    file = tmp_path / "run.json"
    file.write_text(run if isinstance(run, str) else json.dumps(run))
    command = [paths.PROBE, file, tmp_path]
    done = subprocess.run(command, check=False, env=stock_environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("moe-probe: ")]
    assert len(lines) == 1
    assert message in lines[0]
