#!/usr/bin/env python3
"""Unpacks pack.tar.xz, which lies beside it, and runs what it holds: `python3 device-check --help`. Standard library only."""

import contextlib
import hashlib
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

BEGIN = time.monotonic()
PACK = Path(__file__).resolve().with_name("pack.tar.xz")
# What may go wrong with a folder that is read-only or full, and with a pack that was not copied whole.
UNPACKING_ERRORS = (OSError, EOFError, tarfile.TarError)


def unpacked(into: Path) -> Path:
    """Once for each pack: the folder is named after what the pack holds. Those of other packs are removed."""
    with PACK.open("rb") as file:
        digest = (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(file.read()).hexdigest()
        )
    folder = into / f"unpacked-{digest[:12]}"
    if not folder.exists():
        partial = into / f"{folder.name}-partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with tarfile.open(PACK) as archive:
                archive.extractall(partial, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    for other in into.glob("unpacked-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def unpacked_somewhere(until: contextlib.ExitStack) -> Path:
    """Beside this file, else in a temporary folder, which is there until then."""
    try:
        return unpacked(PACK.parent)
    except UNPACKING_ERRORS as error:
        beside = error
    try:
        return unpacked(Path(until.enter_context(tempfile.TemporaryDirectory(prefix="moe-hot-pack-"))))
    except UNPACKING_ERRORS as error:
        raise OSError(f"{PACK} cannot be unpacked there ({beside}), nor in a temporary folder ({error})") from error


def main() -> int:
    if not PACK.exists():
        print(f"device-check: {PACK} is missing; expected the folder that scripts/device-pack has made", file=sys.stderr)
        return 2
    sys.dont_write_bytecode = True
    with contextlib.ExitStack() as until:
        try:
            folder = unpacked_somewhere(until)
        except OSError as error:
            print(f"device-check: {error}; expected a whole copy, and room for it there or by TMPDIR", file=sys.stderr)
            return 2
        sys.path.insert(0, str(folder))
        from device.check import main as check

        return check(BEGIN)


if __name__ == "__main__":
    sys.exit(main())
