"""The copy engines' conformance suite (src/device/copy/testing) on the device: a test program of the plugin's, which was built
where it was packed."""

import re

from device.budget import Skipped
from device.folder import BIN, Failed, Programs

PROGRAM = BIN / "moe-hot-tests"
TEST = "device::machine_tests::copy_engines_conform_on_the_devices_of_this_machine"
CONFORMS = re.compile(
    r"^(?:test .* \.\.\. )?\S+, (\w+) engine, page-locked staging wanted: (true|false): conforms$", re.MULTILINE
)
TEST_FAILED = 101


def measure(programs: Programs, device: str, rpc: str | None) -> dict:
    if not PROGRAM.exists():
        raise Skipped("its program was not packed")
    named = {"MOE_HOT_TEST_BACKENDS": BIN, "MOE_HOT_TEST_DEVICE": device} | ({"MOE_HOT_TEST_RPC": rpc} if rpc else {})
    command = [PROGRAM, "--ignored", "--exact", TEST, "--nocapture"]
    output, errors, _ = programs.run(command, programs.environment(**named), accepts=(0, TEST_FAILED))
    found = [{"engine": engine, "page_locked": locked == "true"} for engine, locked in CONFORMS.findall(output)]
    if "1 passed" not in output:
        why = next(
            (line for line in (errors + output).splitlines() if "panicked" not in line and line.strip()), "it says nothing"
        )
        raise Failed(f"the suite ended early, after {len(found)} of 2 engines: {why[:300]}")
    if len(found) != 2:
        raise Failed("the suite ran on no engine")
    return {"engines": found}
