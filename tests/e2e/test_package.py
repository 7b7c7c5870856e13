"""The packages of scripts/package: what they hold, and that they do the main job where this checkout is not."""

import contextlib
import hashlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import COMMANDS
from experts_json import Profile
from hot import ends, starts
from launcher import launch
from paths import REPOSITORY
from processes import HANG_S, free_port, listens, process, run, stock_environment, wait_for
from root_folder import TOOLS, RootFolder
from server import start

VERSION = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["package"]["version"]
NAME = f"moe-hot-{VERSION}-linux-x86_64"
PACKAGES = REPOSITORY / "build/package"
GLIBC = "2.34"  # the README and the change log say so
SERVED = "serves llama.cpp b11312 (API 2) to b11434 (API 3) and builds with the same layouts"
LLAMA = "/opt/llama"
FILES = {
    "bin/moe-hot",
    "lib/libggml_moe_hot.so",
    "share/bash-completion/completions/moe-hot",
    "share/zsh/site-functions/_moe-hot",
    "share/fish/vendor_completions.d/moe-hot.fish",
    "share/man/man1/moe-hot.1",
    *(f"share/man/man1/moe-hot-{name}.1" for name in COMMANDS),
    *(
        f"share/doc/moe-hot/{name}"
        for name in ["README.md", "CHANGELOG.md", "LICENSE", "THIRD-PARTY-LICENSES", "COPYRIGHT-rust-library.html"]
    ),
}
# One thread, so that both servers share two cores; a fixed answer.
SERVER_ARGUMENTS = ["-t", 1, "-c", 2048, "-np", 1, "--no-warmup", "--no-repack"]
NO_DEVICE = ["-ngl", 0]
PROMPTS = ["Once upon a", "The king said"]


@dataclass(frozen=True)
class Packages:
    archive: Path
    deb: Path


def make_packages() -> None:
    done = subprocess.run([REPOSITORY / "scripts/package"], capture_output=True, text=True, timeout=HANG_S)
    if "needs glibc" in done.stderr and done.returncode == 2:
        pytest.skip(done.stderr.splitlines()[-1])  # this system is newer than those that packages are for
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Packages:
    make_packages()
    folder = tmp_path_factory.mktemp("packages")
    names = {f"{NAME}.tar.gz", f"moe-hot_{VERSION}_amd64.deb", "SHA256SUMS"}
    assert {path.name for path in PACKAGES.iterdir()} == names
    for name in names:
        shutil.copy(PACKAGES / name, folder)
    run(["sha256sum", "--check", "--strict", "SHA256SUMS"], folder / "sums.log", stock_environment())
    return Packages(folder / f"{NAME}.tar.gz", folder / f"moe-hot_{VERSION}_amd64.deb")


@pytest.fixture
def unpacked(packages, tmp_path) -> Path:
    subprocess.run(["tar", "-xzf", packages.archive, "-C", tmp_path], check=True, timeout=HANG_S)
    return tmp_path / NAME


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def install(unpacked: Path, *args, **environment: str) -> subprocess.CompletedProcess:
    command = [unpacked / "install.sh", *args]
    ours = stock_environment(**environment)
    return subprocess.run(command, cwd=unpacked.parent, env=ours, capture_output=True, text=True, timeout=HANG_S)


def assert_refused(done: subprocess.CompletedProcess, *said: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("install.sh: ") and all(part in line for part in said), line


# ---- what they hold


def test_the_archive_holds_what_it_should(packages, unpacked):
    assert set(files_of(unpacked)) == FILES | {"install.sh", "SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=unpacked, check=True, timeout=HANG_S)
    with tarfile.open(packages.archive) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    assert len({member.mtime for member in members}) == 1
    runs = {member.name for member in members if member.isfile() and member.mode & 0o111}
    assert runs == {f"{NAME}/bin/moe-hot", f"{NAME}/install.sh"}


def test_the_same_sources_give_the_same_bytes(packages):
    make_packages()
    for package in (packages.archive, packages.deb):
        again = (PACKAGES / package.name).read_bytes()
        assert hashlib.sha256(again).digest() == hashlib.sha256(package.read_bytes()).digest(), package.name


def test_nothing_in_them_names_the_folder_that_it_was_built_in(unpacked):
    for name, content in files_of(unpacked).items():
        assert str(REPOSITORY).encode() not in content, name


def test_the_debian_package_has_the_archives_files(packages, unpacked, tmp_path):
    root = tmp_path / "deb"
    subprocess.run(["dpkg-deb", "-x", packages.deb, root], check=True, timeout=HANG_S)
    theirs, ours = files_of(root), files_of(unpacked)
    assert theirs == {f"usr/{name}": ours[name] for name in FILES}
    modes = {name: (root / "usr" / name).stat().st_mode & 0o777 for name in FILES}
    assert modes == {name: (unpacked / name).stat().st_mode & 0o777 for name in FILES}


def test_the_debian_package_says_what_it_is_and_needs(packages, tmp_path):
    def field(name: str) -> str:
        return run(["dpkg-deb", "--field", packages.deb, name], tmp_path / "log", stock_environment()).strip()

    assert [field(name) for name in ("Package", "Version", "Architecture")] == ["moe-hot", VERSION, "amd64"]
    assert field("Depends") == f"libc6 (>= {GLIBC}), libgcc-s1"
    assert field("Maintainer") == "moe-hot developers"
    assert SERVED in field("Description").replace("Serves", "serves")
    subprocess.run(["dpkg-deb", "-R", packages.deb, tmp_path / "raw"], check=True, timeout=HANG_S)
    sums = tmp_path / "raw/DEBIAN/md5sums"
    assert set(re.findall(r"  usr/(.*)", sums.read_text())) == FILES
    subprocess.run(["md5sum", "--check", "--quiet", sums], cwd=tmp_path / "raw", check=True, timeout=HANG_S)
    owners = run(["dpkg-deb", "-c", packages.deb], tmp_path / "log", stock_environment())
    assert {line.split()[1] for line in owners.splitlines()} == {"root/root"}


def test_the_glibc_that_is_named_is_the_one_that_is_needed(unpacked):
    needed = set()
    for name in ("bin/moe-hot", "lib/libggml_moe_hot.so"):
        told = subprocess.run(["readelf", "-W", "-V", unpacked / name], capture_output=True, text=True, check=True).stdout
        needed |= {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", told)}
    assert ".".join(map(str, max(needed))) == GLIBC
    for page in (unpacked / "share/doc/moe-hot/README.md", REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md"):
        assert re.search(rf"glibc\s+{re.escape(GLIBC)} or newer", page.read_text()), page


def test_its_own_pages_are_of_this_version(unpacked):
    doc = unpacked / "share/doc/moe-hot"
    readme = (doc / "README.md").read_text()
    assert readme.startswith(f"# moe-hot {VERSION}\n") and SERVED.removeprefix("serves ") in readme and "@" not in readme
    for page in (doc / "CHANGELOG.md", REPOSITORY / "README.md", REPOSITORY / "packaging/Containerfile"):
        assert VERSION in page.read_text()
    assert SERVED.removeprefix("serves ").replace(" and", ", and") in (doc / "CHANGELOG.md").read_text()


def test_the_licences_of_what_is_linked_are_there(unpacked):
    text = (unpacked / "share/doc/moe-hot/THIRD-PARTY-LICENSES").read_text()
    for crate in ("clap", "serde_json", "goblin", "cudarc", "maud"):
        assert re.search(rf"^{crate} [\d.]+\S* \(", text, re.MULTILINE), crate
    assert "the Rust standard library" in text and "The ggml authors" in text
    for crate in ("proptest", "bindgen", "clap_derive"):
        assert not re.search(rf"^{crate} ", text, re.MULTILINE), f"{crate} is not linked"


def test_completions_and_manual_pages_are_those_of_the_command(unpacked, tmp_path):
    command = unpacked / "bin/moe-hot"
    for shell, file in {
        "bash": "bash-completion/completions/moe-hot",
        "zsh": "zsh/site-functions/_moe-hot",
        "fish": "fish/vendor_completions.d/moe-hot.fish",
    }.items():
        said = run([command, "completions", shell], tmp_path / "log", stock_environment())
        assert (unpacked / "share" / file).read_text() == said
    page = (unpacked / "share/man/man1/moe-hot.1").read_text().replace("\\-", "-")
    help_text = launch("--help").out
    flags = set(re.findall(r"^  (--moe-\S+)", help_text, re.MULTILINE))
    assert len(flags) >= 8
    for word in [*flags, *COMMANDS, "LLAMA_ARG_MOE_HOT_CACHE", VERSION, "Examples:"]:
        assert word in page, word
    assert "man-pages" not in help_text and "man-pages" not in page


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_manual_pages_are_set_without_complaints(unpacked):
    for page in sorted((unpacked / "share/man/man1").iterdir()):
        command = ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8", page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert (done.returncode, done.stderr) == (0, ""), page


# ---- --version


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_version_names_the_revisions(command):
    answer = launch(*command.split(), "--version")
    name = f"moe-hot-{command}" if command else "moe-hot"
    assert (answer.code, answer.out, answer.err) == (0, f"{name} {VERSION}\n{SERVED}\n", "")


# ---- scripts/package


def test_the_script_refuses_what_it_cannot_use():
    script = REPOSITORY / "scripts/package"
    for args, environment, said in [
        (["--deb"], {}, "--deb: expected no argument"),
        ([], {"MOE_HOT_OTHER_TREE": "/x"}, "MOE_HOT_OTHER_TREE is set"),
        ([], {"SOURCE_DATE_EPOCH": "today"}, "SOURCE_DATE_EPOCH=today; expected seconds"),
    ]:
        done = subprocess.run(
            [script, *args], env=stock_environment(**environment), capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 2, done
        (line,) = done.stderr.splitlines()
        assert line.startswith("package: ") and said in line


# ---- install.sh


def test_what_is_installed_is_removed_without_a_trace(unpacked, tmp_path):
    prefix = tmp_path / "new/prefix"
    prefix.parent.mkdir()
    done = install(unpacked, prefix)
    assert done.returncode == 0 and f"moe-hot {VERSION} is installed" in done.stdout, done
    assert f"{prefix}/bin is not in PATH" in done.stdout
    assert set(files_of(prefix)) == FILES | {"share/doc/moe-hot/installed"}
    assert "is not in PATH" not in install(unpacked, prefix, PATH=f"{prefix}/bin:{TOOLS}").stdout, "over itself"
    done = install(unpacked, "--uninstall", prefix)
    assert done.returncode == 0, done
    assert list(prefix.parent.iterdir()) == []


def test_what_was_there_before_stays(unpacked, tmp_path):
    prefix = tmp_path / "prefix"
    (prefix / "lib").mkdir(parents=True)
    (prefix / "share/man").mkdir(parents=True)
    (prefix / "share/man/x").write_text("another's")
    assert install(unpacked, "prefix").returncode == 0, "a name that does not begin with a slash"
    (prefix / "bin/other").write_text("later")
    assert install(unpacked, "--uninstall", "prefix/").returncode == 0
    left = {str(path.relative_to(prefix)) for path in prefix.rglob("*")}
    assert left == {"lib", "bin", "bin/other", "share", "share/man", "share/man/x"}


def test_an_older_version_is_replaced(unpacked, tmp_path):
    prefix = tmp_path / "prefix"
    assert install(unpacked, prefix).returncode == 0
    listed = prefix / "share/doc/moe-hot/installed"
    (prefix / "share/old").mkdir()
    (prefix / "share/old/page").write_text("of an older version")
    listed.write_text(listed.read_text() + "share/old/\nshare/old/page\n")
    with open(prefix / "lib/libggml_moe_hot.so", "rb") as in_use:
        assert install(unpacked, prefix).returncode == 0
        assert not (prefix / "lib/libggml_moe_hot.so").samefile(f"/proc/self/fd/{in_use.fileno()}"), "not written to"
    assert not (prefix / "share/old").exists()
    assert install(unpacked, "--uninstall", prefix).returncode == 0
    assert not prefix.exists()


def test_without_a_folder_it_is_the_users(unpacked, tmp_path):
    """Whoever is not root: an `id` that says so stands in for them."""
    tools, home = tmp_path / "tools", tmp_path / "home"
    tools.mkdir()
    home.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    environment = {"PATH": f"{tools}:{TOOLS}", "HOME": str(home)}
    assert install(unpacked, **environment).returncode == 0
    assert (home / ".local/bin/moe-hot").is_file()
    assert install(unpacked, "--uninstall", **environment).returncode == 0
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("name", sorted(["lib/libggml_moe_hot.so", "install.sh", "share/doc/moe-hot/LICENSE"]))
def test_a_damaged_package_is_refused(unpacked, tmp_path, name):
    file = unpacked / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert_refused(install(unpacked, tmp_path / "prefix"), name, "damaged or missing")
    assert not (tmp_path / "prefix").exists()


def test_a_package_that_is_not_whole_is_refused(unpacked, tmp_path):
    sums, prefix = unpacked / "SHA256SUMS", tmp_path / "prefix"
    whole = sums.read_text()
    sums.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert_refused(install(unpacked, prefix), "the files that SHA256SUMS names")
    sums.write_text("no sums\n")
    assert_refused(install(unpacked, prefix), "SHA256SUMS is damaged")
    sums.write_text(whole)
    (unpacked / "bin/more").write_text("x")
    assert_refused(install(unpacked, prefix), "no others")
    (unpacked / "bin/more").unlink()
    (unpacked / "lib/libggml_moe_hot.so").unlink()
    assert_refused(install(unpacked, prefix), "lib/libggml_moe_hot.so is damaged or missing")
    sums.unlink()
    assert_refused(install(unpacked, prefix), "SHA256SUMS is missing")
    assert not prefix.exists()


def test_bad_arguments_are_refused(unpacked, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for args, said in {
        ("--nonsense",): "--nonsense: no such option",
        ("a", "b"): "b: expected one folder",
        ("--uninstall", "a", "b"): "b: expected one folder",
        ("",): "expected the name of a folder",
        (str(file),): f"{file}: cannot be written to",
        ("--uninstall", str(tmp_path)): "moe-hot was not installed there",
    }.items():
        assert_refused(install(unpacked, *args), said)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "file"}
    assert "--uninstall" in install(unpacked, "--help").stdout


# ---- elsewhere


def readme_commands() -> list[list[str]]:
    """The three commands of the package's README, as words."""
    text = (REPOSITORY / "packaging/README.md").read_text()
    lines = re.findall(r"^    (moe-hot .*)$", text, re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [command[1] for command in commands] == ["inspect", "llama-server", "llama-server"]
    return commands


@pytest.fixture
def root(tmp_path) -> RootFolder:
    return RootFolder.make(tmp_path / "root", LLAMA)


@contextlib.contextmanager
def rpc_server(root: RootFolder, log: Path) -> Iterator[int]:
    """On this port."""
    port = free_port()
    command = [f"{root.llama}/ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-d", "CPU", "-t", 1]
    with process(root.command(command), log, stock_environment()) as child:

        def is_ready() -> bool:
            assert child.poll() is None, log.read_text(errors="replace")
            return listens(port)

        wait_for("the RPC server listens", is_ready)
        yield port


def serve(root: RootFolder, folder: Path, name: str, command: list, path: str, **environment: str) -> str:
    """Chats with a server that a command starts, ends it, and returns what it has logged."""
    words = [*command, *SERVER_ARGUMENTS, *NO_DEVICE]
    with start(root.command(words, path, **environment), folder, name, stock_environment()) as server:
        for prompt in PROMPTS:
            assert server.complete(prompt, 40).n_predicted == 40
        server.chat("Tell me of the king.", 20)
        server.stop()
    return server.log.read_text(errors="replace")


def do_the_main_job(root: RootFolder, folder: Path, path: str, commands: list[list[str]]) -> None:
    """Inspects, records, uses; the last with experts on an RPC server's device, since there is no GPU."""
    inspect, record, use = commands
    said = root.run(inspect, folder / "inspect.log", path)
    assert "layers with experts: 6 of 6" in said
    serve(root, folder, "record", record, path)
    profile = root.home("experts.json")
    assert Profile.read(profile).layer_calls > 0
    with rpc_server(root, folder / "rpc-server.log") as port:
        device = ["--rpc", f"127.0.0.1:{port}", "--moe-hot-cache-device", "RPC0"]
        # A cache that loses is not given up: this device is the processor.
        log = serve(root, folder, "use", [*use, *device], path, MOE_HOT_TEST_NO_GUARD="1", MOE_HOT_TEST_WAIT="1")
    (begun,), (ended,) = starts(log), ends(log)
    assert begun.device == "RPC0" and ended.hits > 0, log
    assert json.loads(profile.read_text())["schema"] == "llama.cpp.moe_layer_perf.v1"


def test_the_archives_three_commands_do_the_main_job(packages, root, tmp_path):
    """Unpacked and installed there, llama.cpp found in PATH."""
    assert not root.sees(REPOSITORY) and root.sees(Path(LLAMA) / "libggml-cpu.so")
    shutil.copy(packages.archive, root.path / "tmp")
    install_it = f"tar -xzf /tmp/{NAME}.tar.gz -C /tmp && /tmp/{NAME}/install.sh && rm -r /tmp/{NAME}*"
    said = root.run(["sh", "-c", install_it], tmp_path / "install.log")
    assert "the command is /usr/local/bin/moe-hot" in said
    do_the_main_job(root, tmp_path, f"/usr/local/bin:{LLAMA}:{TOOLS}", readme_commands())


def test_without_a_gpu_one_line_says_so_and_the_program_goes_on(packages, root, tmp_path):
    """The Debian package's files, and a program that is named by its path."""
    subprocess.run(["dpkg-deb", "-x", packages.deb, root.path / "deb"], check=True, timeout=HANG_S)
    command = ["/deb/usr/bin/moe-hot", f"{LLAMA}/llama-completion", "-m", "model.gguf", "-no-cnv", "-n", 40, "-t", 1]
    command += ["-p", "Once upon a", "--no-warmup"]
    root.run([*command, "--moe-layer-perf-out", "experts.json"], tmp_path / "record.log")
    assert Profile.read(root.home("experts.json")).layer_calls > 0
    root.run([*command, "--moe-hot-cache", "experts.json"], tmp_path / "use.log")
    log = (tmp_path / "use.log").read_text(errors="replace")
    assert len([line for line in log.splitlines() if "no hot cache: " in line]) == 1, log


# ---- the container file


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


def instructions(text: str) -> Iterator[Instruction]:
    """What a container file says, its variables put in."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    variables = {}
    for line in joined.splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        for variable, value in variables.items():
            rest = rest.replace(f"${{{variable}}}", value)
        if name == "ARG":
            variable, _, value = rest.partition("=")
            variables[variable] = value
        yield Instruction(name, rest.strip())


def test_the_container_file_does_the_main_job_in_a_root_folder(packages, tmp_path):
    """Its instructions carried out on a folder instead of llama.cpp's image: that has the programs in /app."""
    root = RootFolder.make(tmp_path / "root", "/app")
    steps = list(instructions((REPOSITORY / "packaging/Containerfile").read_text()))
    assert [step.name for step in steps] == ["ARG", "FROM", "ARG", "COPY", "RUN", "RUN", "ENTRYPOINT"]
    assert steps[1].text == "ghcr.io/ggml-org/llama.cpp:server-cuda"
    for number, step in enumerate(steps):
        assert "$" not in step.text
        if step.name == "COPY":
            source, target = step.text.split()
            shutil.copy(packages.archive.parent / source, root.path / target[1:])
        elif step.name == "RUN":
            root.run(["sh", "-c", step.text], tmp_path / f"step-{number}.log")
    assert list((root.path / "tmp").iterdir()) == [], "nothing is left behind"
    entry = json.loads(steps[-1].text)
    start_it = [[*entry, *words[2:]] for words in readme_commands()[1:]]
    inspect = ["/usr/local/bin/moe-hot", *readme_commands()[0][1:]]
    do_the_main_job(root, tmp_path, TOOLS, [inspect, *start_it])


def test_an_image_whose_llama_is_not_served_is_refused_while_it_is_built(packages, tmp_path):
    root = RootFolder.make(tmp_path / "root", "/app")
    with tarfile.open(fileobj=io.BytesIO(packages.archive.read_bytes())) as tar:
        tar.extractall(root.path / "usr/local", filter="tar")
    (root.path / "usr/local" / NAME).rename(root.path / "usr/local/package")
    # A program that says what an older one would.
    program = root.path / "app/llama-server"
    program.unlink()
    refusal = "moe-hot: not loaded, the host goes on without it: backend API 1; served are some"
    answers = {"--version": "version: 6123 (79c1160b0)", "--help": "--list-devices", "--list-devices": refusal}
    cases = "".join(f"{question}) echo '{text}';;\n" for question, text in answers.items())
    program.write_text(f"#!/bin/sh\nfor last; do :; done\ncase $last in\n{cases}esac\n")
    program.chmod(0o755)
    (check,) = [
        step.text
        for step in instructions((REPOSITORY / "packaging/Containerfile").read_text())
        if step.name == "RUN" and "--list-devices" in step.text
    ]
    check = check.replace("/usr/local/bin/moe-hot", "/usr/local/package/bin/moe-hot")
    done = subprocess.run(root.command(["sh", "-c", check]), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2 and "6123" in done.stderr and "backend API 1" in done.stderr, done
