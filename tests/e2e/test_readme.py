"""The README's commands do what it says. Every command in its section on use is run, in a folder that looks like the repository."""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import vulkan
from conftest import shipped_model
from hot import END, START, ends, starts
from paths import LAUNCHER, PLUGIN, REPOSITORY
from processes import HANG_S, free_port, listens, process, stock_environment, wait_for
from server import Server

README = (REPOSITORY / "README.md").read_text()
PORT, N_ANSWERS, N_TOKENS = "50052", 6, 120


def commands() -> list[str]:
    """Of the section on use: lines of its blocks, joined where they go on."""
    section = README.split("\n## Use\n")[1].split("\n## ")[0]
    blocks = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    lines = [line.split("   #")[0].strip() for line in blocks.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in lines if line and not line.startswith("moe-hot: ")]


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "tests/models").mkdir(parents=True)
    (tmp_path / "target/release").mkdir(parents=True)
    for file, name in [(LAUNCHER, "moe-hot"), (PLUGIN, "libggml_moe_hot.so")]:
        (tmp_path / "target/release" / name).symlink_to(file)
    (tmp_path / "build").symlink_to(REPOSITORY / "build")
    shutil.copy(shipped_model(), tmp_path / "tests/models/moe-small.gguf")
    shutil.copy(shipped_model(), tmp_path / "model.gguf")
    return tmp_path


def serve(here: Path, command: str, name: str, *more: str, n_answers: int = 1) -> str:
    """Runs a server's command, asks it, ends it; returns what it said."""
    port = free_port()
    words = [*shlex.split(command), "--port", str(port), "-c", "2048", "-np", "1", *more]
    log = here / f"{name}.log"
    with process(words, log, stock_environment(MOE_HOT_TEST_NO_GUARD="1")) as running:
        server = Server(running, port, log)
        wait_for("the server answers", server.healthy)
        for n in range(n_answers):
            server.complete(f"The {['house', 'dog', 'girl', 'tree', 'boy', 'sun'][n % 6]}", N_TOKENS)
        running.send_signal(signal.SIGINT)
        assert running.wait(HANG_S) == 0
    return log.read_text(errors="replace")


def lines_of_readme() -> list[str]:
    return [line.strip() for line in README.splitlines() if line.startswith("    moe-hot: ")]


def test_every_command_is_known():
    """What follows runs each of them: one that is new needs a test."""
    assert commands() == [
        "target/release/moe-hot llama-server -m model.gguf --moe-hot-cache auto",
        "target/release/moe-hot llama-server -m model.gguf --moe-layer-perf-out experts.json",
        "target/release/moe-hot llama-server -m model.gguf --moe-hot-cache experts.json",
        ". build/vulkan/env",
        "MOE_HOT_TEST_NO_GUARD=1 MOE_HOT_TEST_WAIT=1 target/release/moe-hot build/vulkan/bin/llama-completion -m tests/models/moe-small.gguf "
        '-no-cnv -t 1 -ngl 0 -p "The house" -n 300 --ignore-eos --moe-hot-cache auto',
        "build/stock/bin/ggml-rpc-server -d CPU -p 50052 &",
        "target/release/moe-hot llama-server -m tests/models/moe-small.gguf --rpc 127.0.0.1:50052 "
        "--moe-hot-cache auto --moe-hot-cache-device RPC0",
    ]


def test_the_first_commands_run_without_a_gpu_and_say_so(here):
    auto, record, use, *_ = commands()
    said = "no hot cache: no GPU with memory of its own was found (--moe-hot-cache-device names another device)"
    assert said in serve(here, auto, "auto")
    assert re.search(r"moe-hot: recorded [1-9]\d* \(token, expert\) requests", serve(here, record, "record"))
    assert (here / "experts.json").exists()
    assert said in serve(here, use, "use")


def test_what_is_said_of_the_second_start(here):
    """On a server of llama.cpp's own, as in the README's last command. Its lines look like those of the README."""
    port = free_port()
    *_, rpc_server, serving = commands()
    words = shlex.split(rpc_server.removesuffix("&").replace(PORT, str(port)))
    with process(words, here / "rpc.log", stock_environment()) as rpc:
        wait_for("the RPC server listens", lambda: listens(port) or rpc.poll() is not None)
        command, size = serving.replace(PORT, str(port)), ["--moe-hot-cache-max-mib", "4"]
        first = serve(here, command, "first", *size, n_answers=N_ANSWERS)
        second = serve(here, command, "second", *size, n_answers=N_ANSWERS)
    assert "nothing is learnt yet; profile: " in first
    assert ends(second)[0].hits > 0 and starts(second)[0].expected > 0
    said = [line[line.index("moe-hot: ") :] for line in second.splitlines() if START.search(line) or END.search(line)]
    print("\n".join(said))
    shape = [re.sub(r"[\d.]+|/\S+|model.gguf\S*", "N", line) for line in said]
    assert shape == [re.sub(r"[\d.]+|/\S+|model.gguf\S*", "N", line) for line in lines_of_readme()]


def test_the_commands_of_the_page_on_tuning(here):
    """Those of docs/commands.md have a test of their own."""
    page = (REPOSITORY / "docs/tuning.md").read_text()
    commands = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    assert commands == ["moe-hot calibrate", "moe-hot plan model.gguf --vram 12GiB"]
    environment = stock_environment(XDG_CONFIG_HOME=str(here / "config"))
    for command in commands:
        words = [LAUNCHER, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0 and done.stdout, done.stderr


def test_the_command_on_vulkan(here):
    vulkan.require()
    load, run = commands()[3:5]
    done = subprocess.run(
        ["bash", "-c", f"{load}\n{run}"],
        cwd=here,
        env=stock_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    (end,) = ends(done.stderr)
    assert end.hits > 0
    assert (here / "tests/models/moe-small.gguf.experts.json").exists()
