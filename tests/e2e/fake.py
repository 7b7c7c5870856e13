"""FakeDevice (tests/fake-device): a GPU that is not there, loaded into real programs, alone or with the plugin."""

import json
from pathlib import Path

from paths import FAKE
from processes import stock_environment

FAKE_DEVICE = "FAKE0"
# Options of moe-probe. One thread, as FakeDevice computes with.
ON_DEVICE = {"device": FAKE_DEVICE, "n_gpu_layers": 99, "n_threads": 1}


def fake_environment(*, plugin: Path | None = None, **settings: str | int | Path) -> dict[str, str]:
    """Loads FakeDevice, and `plugin` through it. Settings in lower case are FakeDevice's (latency_us=100,
    fault="alloc=2"); those in upper case are taken as they are. FakeDevice computes on the host's processor, which seldom
    pays: unless a test says otherwise (MOE_HOT_TEST_NO_GUARD=0), a cache that loses is not noticed. And tokens wait until
    their context's lane is ready (else: MOE_HOT_TEST_WAIT=0), so that hits do not depend on who is faster."""
    ours = {name if name.isupper() else f"FAKE_{name.upper()}": str(value) for name, value in settings.items()}
    load = {"FAKE_LOAD": str(plugin)} if plugin else {}
    return stock_environment(GGML_BACKEND_PATH=str(FAKE), MOE_HOT_TEST_NO_GUARD="1", MOE_HOT_TEST_WAIT="1", **load) | ours


def read_stats(file: Path) -> dict[str, int]:
    """What FakeDevice counted, from the file of its setting `stats`."""
    return json.loads(file.read_text())
