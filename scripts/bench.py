"""Measures moe-hot. Needs scripts/setup to have run, and a machine that does nothing else.

`scripts/bench overhead --json FILE`: what the plugin costs, with nothing resident and with experts resident.
`scripts/bench overlap --json FILE`: what it brings that both lanes work at the same time.
`scripts/bench vulkan --json FILE`: what our round trips cost on a real GPU backend.
`scripts/bench starts --json FILE`: start-up, memory of process and device.
`scripts/bench profiles --json FILE`: reading and writing profiles, replaying policies.
`scripts/bench all --json DIR`: all but vulkan, one file each in DIR; --quick: with few runs of a small model, to see that it works.

Each says what it has measured and exits with 1 if a bar is missed; `benchmarks/` has the details.
"""

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

from benchmarks import overhead, overlap, profiles, programs, starts, vulkan

from models import generated

BENCHES = {"overhead": overhead, "overlap": overlap, "vulkan": vulkan, "starts": starts, "profiles": profiles}
ALL = ("overhead", "overlap", "starts", "profiles")
QUICK_PAIRS, QUICK_TOKENS, QUICK_MODEL = 2, 40, "Q4_K"


def number(text: str, at_least: int) -> int:
    value = int(text)
    if value < at_least:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {at_least}")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    for name, bench in BENCHES.items():
        command = commands.add_parser(name, help=bench.HELP)
        command.add_argument("--json", type=Path, help="write everything measured to this file")
        command.add_argument("--pairs", type=lambda text: number(text, 2), default=30, help="rounds of runs, 30")
        command.add_argument("--tokens", type=lambda text: number(text, 1), default=128, help="decoded in a run, 128")
        command.add_argument("--model", type=Path, help="instead of the generated one")
        bench.add_arguments(command)
        command.set_defaults(benches={name: bench})
    command = commands.add_parser("all", help="all of them but vulkan, one JSON file each")
    command.add_argument("--json", type=Path, required=True, metavar="DIR", help="write everything measured to this folder")
    command.add_argument("--pairs", type=lambda text: number(text, 2), default=30, help="rounds of runs, 30")
    command.add_argument("--tokens", type=lambda text: number(text, 1), default=128, help="decoded in a run, 128")
    command.add_argument("--model", type=Path, help="instead of the generated one")
    command.add_argument("--quick", action="store_true", help="few runs of a small model: the figures mean nothing")
    command.set_defaults(benches={name: BENCHES[name] for name in ALL}, sections=overhead.SECTIONS)
    args = parser.parse_args()
    if getattr(args, "quick", False):
        args.pairs, args.tokens, args.model = QUICK_PAIRS, QUICK_TOKENS, args.model or generated(QUICK_MODEL)
    return args


def run(name: str, bench, args: argparse.Namespace) -> list[str]:
    """Measures, prints and writes; returns the bars that are missed."""
    measured = {
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": programs.machine(),
        **bench.measure(args),
    }
    bench.report(measured)
    if args.json:
        file = args.json / f"{name}.json" if len(args.benches) > 1 else args.json
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measured, indent=1) + "\n")
    return bench.missed_bars(measured)


def main() -> None:
    args = arguments()
    missed = [bar for name, bench in args.benches.items() for bar in run(name, bench, args)]
    print("\n".join(missed) if missed else "all bars are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
