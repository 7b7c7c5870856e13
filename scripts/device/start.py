#!/usr/bin/env python3
"""Unpacks pack.tar.xz, which lies beside it, and runs what it holds: `python3 device-check --help`. Standard library only."""

import hashlib
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

BEGIN = time.monotonic()
PACK = Path(__file__).resolve().with_name("pack.tar.xz")


def unpacked(into: Path) -> Path:
    """Once for each pack: the folder is named after what the pack holds."""
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
        with tarfile.open(PACK) as archive:
            archive.extractall(partial, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        partial.rename(folder)
    return folder


def main() -> int:
    if not PACK.exists():
        print(f"device-check: {PACK} is missing; expected the folder that scripts/device-pack has made", file=sys.stderr)
        return 2
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="moe-hot-pack-") as temporary:
        try:
            folder = unpacked(PACK.parent)
        except PermissionError:
            folder = unpacked(Path(temporary))
        sys.path.insert(0, str(folder))
        from device.check import main as check

        return check(BEGIN)


if __name__ == "__main__":
    sys.exit(main())
