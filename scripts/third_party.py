"""Prints the licences of what the plugin and the command are made of: the crates that are linked into them, and ggml's headers.

Called by scripts/package. Ends with 2 where a licence is not known.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "x86_64-unknown-linux-gnu"
TEXTS = re.compile(r"^(licen[cs]e|copying|unlicense|notice)", re.IGNORECASE)
RULE = "=" * 100
NO_TEXT = """\
Permission is granted under the terms of the MIT license, whose text is that of moe-hot's own in the file LICENSE. The package
of this crate holds no text of it."""


def refuse(message: str) -> None:
    print(f"third_party.py: {message}", file=sys.stderr)
    sys.exit(2)


def metadata() -> dict:
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        refuse(f"cargo metadata failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def is_macro(package: dict) -> bool:
    """Whether it runs while others are compiled, and nothing of it is linked."""
    return any("proc-macro" in target["kind"] for target in package["targets"])


def linked(data: dict) -> list[dict]:
    """The packages whose code is part of what is built, without our own."""
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    ours = data["resolve"]["root"]
    found, waiting = set(), [ours]
    while waiting:
        here = waiting.pop()
        if here in found or is_macro(packages[here]):
            continue
        found.add(here)
        needed = [edge for edge in nodes[here]["deps"] if any(kind["kind"] is None for kind in edge["dep_kinds"])]
        waiting += [edge["pkg"] for edge in needed]
    return sorted((packages[name] for name in found - {ours}), key=lambda package: (package["name"], package["version"]))


def texts(package: dict) -> Iterator[str]:
    """The texts that come with a package. Where it may be had under MIT's, among others, that one is taken."""
    folder = Path(package["manifest_path"]).parent
    files = sorted(path for path in folder.iterdir() if path.is_file() and TEXTS.match(path.name))
    notices = [path for path in files if path.name.lower().startswith("notice")]
    terms = [path for path in files if path not in notices]
    if not terms:
        if "MIT" not in re.findall(r"[\w.-]+", package["license"] or ""):
            refuse(f"{package['name']} {package['version']}: no licence text in its package; expected a file LICENSE")
        yield NO_TEXT
    mit = [path for path in terms if "mit" in path.name.lower()]
    for path in [*(mit or terms), *notices]:
        yield path.read_text(errors="replace").strip()


def main() -> None:
    version = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    names, by_text = [], {}
    for package in linked(metadata()):
        name = f"{package['name']} {package['version']}"
        names.append(f"{name} ({package['license'] or 'see below'})")
        for text in texts(package):
            by_text.setdefault(text, []).append(name)
    names.append(f"the Rust standard library {version} (MIT OR Apache-2.0), see COPYRIGHT-rust-library.html")
    names.append("declarations of ggml's, from llama.cpp (MIT)")
    by_text.setdefault((ROOT / "llama.cpp/LICENSE").read_text().strip(), []).append("ggml, llama.cpp")
    print("moe-hot's own licence is in the file LICENSE. Its plugin and its command are made of these, too:\n")
    print("\n".join(names))
    for text, owners in by_text.items():
        print(f"\n{RULE}\n{', '.join(owners)}\n{RULE}\n\n{text}")


main()
