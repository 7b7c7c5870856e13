"""The table, and the file that a user may send: nothing in it tells whose machine it is."""

import contextlib
import getpass
import json
import os
import pwd
import re
import socket
import tempfile
from pathlib import Path

from device.folder import ROOT
from device.speeds import LEAST_DECODE, LEAST_PROMPT

ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b|\b[\w.+-]+@[\w-]+\.[\w.]+\b"
)
GROUPS = r"[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})"
ADDRESS_V6 = re.compile(
    rf"\[?(?<![\w:])(?:{GROUPS}{{7}}(?!\w|:[\w:])|{GROUPS}*::(?:{GROUPS}*)?|::{GROUPS}*)(?:%\w+)?(?:\](?::\d+)?)?"
)
# Where a path begins: not within words such as tokens/s, but after a dot, and at home.
PATH = r"(?<![\w./~)])(?:~[\w.-]*|\.{1,2})?/(?=\S)"
# One in quotes; one that is all there is; any other goes up to a blank, or further where a few words are followed by a slash.
QUOTED = re.compile(rf"""(["'`]){PATH}.*?\1""")
WHOLE = re.compile(rf"^{PATH}(?!.* -)[^:\n]*$")
LETTER = r"""(?:\\.|[^\s"'`:;\\])"""
FOLDERS = re.compile(rf"{PATH}{LETTER}*(?:(?: (?![-/])(?:(?!/){LETTER})+){{1,4}}/{LETTER}*)*")
# Words of ours that a name of someone could be.
OWN_WORDS = ("root", "localhost", "done", "skipped", "failed")
SHORTEST_NAME = 3


def rows(results: dict) -> list[tuple[str, str]]:
    """What was found, in words: one line or more for each part."""
    lines = []
    for name, part in results["parts"].items():
        if part["status"] != "done":
            lines.append((name, f"{part['status']}: {part['reason']}"))
        else:
            lines += [(name, words) for words in WORDS[name](part["result"])]
    return lines


def table(results: dict) -> str:
    about = results["machine"]
    device = about["device"]
    lines = [
        ("processor", f"{about['processor']}, {about['processors']} processors, {about['memory_mib'] // 1024} GiB"),
        ("device", f"{device['name']}: {device['description']}, {device['mib']} MiB"),
        *rows(results),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {words}" for name, words in lines)


def shown(ratio: dict) -> str:
    (over, above), (under, below) = ratio["speeds"].items()
    return (
        f"{ratio['median']:.3f} ({ratio['least']:.3f} to {ratio['most']:.3f}, {ratio['rounds']} rounds); "
        f"{over} {above:.1f}, {under} {below:.1f}"
    )


def against(ratio: dict, least: float, cache: dict) -> str:
    """A cache that was off meets nothing."""
    if cache["is_off"]:
        return f"; says nothing of {least}, which is hoped for: the cache was off"
    return f"; {'met' if ratio['median'] >= least else 'MISSED'}: {least} is hoped for"


def shown_cache(cache: dict) -> str:
    hits = "no hits" if cache["hit_rate"] is None else f"{cache['hit_rate']:.1%} hits"
    return f"{cache['mib']} MiB, {hits}{': held back or OFF' if cache['is_off'] else ''}"


def words_of(cache: dict) -> str:
    return f"; it says: {cache['says'][0]}" if cache["says"] else ""


def of_conformance(result: dict) -> list[str]:
    return [
        f"{e['engine']} engine conforms, page-locked memory {'wanted' if e['page_locked'] else 'not wanted'}"
        for e in result["engines"]
    ]


def of_rows(result: dict) -> list[str]:
    errors = {name: found["error"] for name, found in result["types"].items() if "error" in found}
    lines = []
    if errors:
        worst = max(errors, key=errors.__getitem__)
        computed = f"{len(errors)} of {len(result['types'])} types computed there"
        lines.append(f"{computed}; the largest error is {errors[worst]:.1e} ({worst}), {result['most_error']:.0e} is allowed")
    reasons: dict[str, list[str]] = {}
    for name, found in result["types"].items():
        if "skipped" in found:
            reasons.setdefault(found["skipped"], []).append(name)
    lines += [f"not checked: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if result["failed_types"]:
        lines.append(f"FAILED: {', '.join(result['failed_types'])}")
    return lines


def of_model(result: dict) -> list[str]:
    shape = f"{result['layers']} layers of {result['experts']} experts"
    return [f"{shape}, {result['experts_mib']} MiB of experts, made in {result['seconds']:.0f} s"]


def of_routing(result: dict) -> list[str]:
    lines = []
    for name, found in result.items():
        hits = " ".join(f"{hit:.2f}" for hit in found["hits"]["default"].values())
        lru = " ".join(f"{hit:.2f}" for hit in found["hits"]["lru"].values())
        covered = " ".join(f"{share:.2f}" for share in found["coverage"].values())
        slots = ", ".join(found["coverage"])
        lines.append(
            f"{name}: overlap {found['overlap']:.2f}; at {slots} of {found['experts']} experts: hits {hits}, LRU {lru}, covered {covered}"
        )
    return lines


def of_threads(result: dict) -> list[str]:
    tried = ", ".join(f"{threads}: {speed:.1f}" for threads, speed in result["decode_by_threads"].items())
    return [f"{result['threads']} are fastest for stock (tokens/s by threads: {tried})"]


def of_overhead(result: dict) -> list[str]:
    return [f"{what}, recording / stock: {shown(result[what])} tokens/s" for what in ("decode", "prompt")]


def of_layers(result: dict) -> list[str]:
    lines = []
    for share, found in result.items():
        kinds = {kind: calls for kind, calls in found["calls"].items() if kind != "first"}
        if kinds:
            kind, most = max(kinds.items(), key=lambda item: item[1]["calls"])
            parts = ", ".join(f"{name.replace('_', ' ')} {us:.0f}" for name, us in most["us"].items())
            hit = f"{most['hits_per_call']:.1f} of {most['requests_per_call']:.1f} hit"
            lines.append(f"{share} resident: {parts} us a call ({kind}, {hit}); {found['decode']:.1f} tokens/s")
    return lines


def of_cache(result: dict) -> list[str]:
    lines = []
    for share, found in result.items():
        if "skipped" in found:
            lines.append(f"{share} of the experts: skipped: {found['skipped']}")
            continue
        cache = found["cache"]
        ours, other = f"cache ({shown_cache(cache)})", f"--n-cpu-moe {found['n_cpu_moe']} ({found['mib']} MiB)"
        lines.append(f"{share} of the experts, {ours} / {other}: {shown(found['to whole layers'])} tokens/s{words_of(cache)}")
        if "to all on the CPU" in found:
            lines[-1] += against(found["to whole layers"], LEAST_DECODE, cache)
            lines.append(f"{share} of the experts, cache / --cpu-moe: {shown(found['to all on the CPU'])} tokens/s")
    return lines


def of_prompts(result: dict) -> list[str]:
    cache = result["cache"]
    what = f"prompt of {result['tokens']} tokens, filled cache ({shown_cache(cache)}) / --cpu-moe"
    bar = against(result["prompt"], LEAST_PROMPT, cache)
    return [f"{what}: {shown(result['prompt'])} tokens/s{words_of(cache)}{bar}"]


def of_copies(result: dict) -> list[str]:
    alone, decode = result["alone_mb_per_s"], result["decode"]
    beside, without = decode["beside copies"], decode["without copies"]
    return [
        f"blocks of {result['block_bytes']} bytes: page-locked {alone['page-locked']:.0f} MB/s, pageable "
        f"{alone['pageable']:.0f}; page-locked beside the CPU {result['beside_the_cpu_mb_per_s']:.0f}",
        f"decode on the CPU beside them: {beside:.1f} tokens/s, {without:.1f} without ({result['decode_kept']:.2f})",
    ]


def of_compare(result: dict) -> list[str]:
    """What it found is in results.json."""
    lines = []
    for vram, found in result.items():
        failed = f"FAILED: {found['failed']}" if "failed" in found else "done, see results.json"
        lines.append(f"--vram {vram}: " + (f"skipped: {found['skipped']}" if "skipped" in found else failed))
    return lines


WORDS = {
    "conformance": of_conformance,
    "rows": of_rows,
    "model": of_model,
    "routing": of_routing,
    "threads": of_threads,
    "overhead": of_overhead,
    "layers": of_layers,
    "cache": of_cache,
    "prompts": of_prompts,
    "copies": of_copies,
    "compare": of_compare,
}


def names_of_owner() -> list[str]:
    """The machine's names and the user's, also of one who uses sudo. Short ones are left: they would be found within words."""
    names = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn(), Path.home().name}
    names |= {os.environ.get(variable, "") for variable in ("SUDO_USER", "USER", "LOGNAME")}
    for found in (getpass.getuser, lambda: Path.cwd().owner()):
        with contextlib.suppress(KeyError, OSError):
            names.add(found())
    return sorted((name for name in names if len(name) >= SHORTEST_NAME and name not in OWN_WORDS), key=len, reverse=True)


def folders_of_owner() -> list[str]:
    """Folders that are known, so that blanks in them do no harm; the longest first."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), ROOT}
    with contextlib.suppress(KeyError):
        folders.add(Path(pwd.getpwnam(os.environ.get("SUDO_USER", "")).pw_dir))
    return sorted((str(folder) for folder in folders if len(folder.parts) > 1), key=len, reverse=True)


def without_personal_data(value):
    """The same without folders, addresses, and names of machine and user. Keys are this script's own and stay."""
    folders, names = folders_of_owner(), names_of_owner()

    def clean(inner):
        if isinstance(inner, dict):
            return {key: clean(of_key) for key, of_key in inner.items()}
        if isinstance(inner, list):
            return [clean(one) for one in inner]
        return cleaned(inner, folders, names) if isinstance(inner, str) else inner

    return clean(value)


def cleaned(text: str, folders: list[str], names: list[str]) -> str:
    for pattern in (QUOTED, WHOLE):
        text = pattern.sub("(path)", text)
    for folder in folders:
        # Without blanks it is found as any other.
        text = re.sub(rf"{re.escape(folder)}(?![\w-])", "/.", text)
    text = FOLDERS.sub("(path)", text)
    text = ADDRESS_V6.sub("(address)", ADDRESS.sub("(address)", text))
    for name in names:
        text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", "(name)", text, flags=re.IGNORECASE)
    return text


def shown_command(arguments: list[str]) -> str:
    """Flags and numbers of a command; everything else may be a name or a path."""
    kept = [re.match(r"--[a-z-]+|-[a-z]|\d+(?:\.\d+)?$", word) for word in arguments]
    return " ".join(["scripts/device-check", *(word[0] for word in kept if word)])


def write_report(path: Path, results: dict) -> None:
    clean = without_personal_data(results)
    path.write_text(json.dumps({"table": table(clean).splitlines(), **clean}, indent=1) + "\n")
