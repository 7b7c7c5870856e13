"""Measures moe-hot. Needs scripts/setup to have run, and a machine that does nothing else.

`scripts/bench overhead --json FILE`: what the plugin costs, with nothing resident and with experts resident.
`scripts/bench overlap --json FILE`: what it brings that both lanes work at the same time.
`scripts/bench vulkan --json FILE`: what our round trips cost on a real GPU backend.

Each says what it has measured and exits with 1 if a bar is missed; `benchmarks/` has the details.
"""

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

from benchmarks import overhead, overlap, programs, vulkan

BENCHES = {"overhead": overhead, "overlap": overlap, "vulkan": vulkan}


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
        command.set_defaults(bench=bench)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    measured = {
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": programs.machine(),
        **args.bench.measure(args),
    }
    args.bench.report(measured)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    missed = args.bench.missed_bars(measured)
    print("\n".join(missed) if missed else "all bars are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
