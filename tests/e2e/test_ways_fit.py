"""Automatic `--fit` (on by default): with the plugin it ends with the same placement as stock, and the same answer.

The RPC device says that it has all of the machine's memory, so `--fit-target` decides how little of it may be used:
from nearly nothing, where whole layers stay on the CPU, over some layers' experts, to all that the model wants.
"""

import os
import re

import pytest

from experts_json import Profile
from models import generated
from results import record_result
from ways import (
    N_LAYERS,
    RPC_NAME,
    SHAPE,
    Programs,
    Run,
    Way,
    assert_computed,
    assert_same_answer,
    expected_rows,
)

MIB = 2**20
MAY_USE_MIB = {"with -c": (5, 14, 18, 22, 40), "without -c": (5, 14, 40)}
CONTEXT = {"with -c": ("-c", 512), "without -c": ()}
MAY_USE_WITHOUT_EXPERTS_MIB = 12  # the context must be shortened
FIT = ("-fitc", 512, "--rpc")
TYPE = "F16"  # 6 MiB a layer, of which fit can see that it counts whole MiB


def device_mib() -> int:
    """What ggml's CPU device, and so the RPC device, reports as free."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB


@pytest.fixture
def programs(tmp_path) -> Programs:
    return Programs(tmp_path, generated(TYPE))


def decided(run: Run) -> tuple:
    """What fit said, and what came of it: layers on the device, length of the context, MiB on the device."""
    (verdict,) = re.findall(r"common_fit_params: (successfully fit|failed to fit)", run.log)
    (layers,) = re.findall(r"offloaded (\d+)/\d+ layers to GPU", run.log)
    (context,) = re.findall(r"n_ctx_seq +=\s+(\d+)", run.log)
    return verdict, layers, context, [size for name, size in run.buffers.items() if name.startswith("RPC")]


def fitted_layers(programs: Programs, way: Way) -> tuple:
    """Layers that the plugin computed (some may be shared with the device), after comparing with stock."""
    stock, ours = programs.stock(way), programs.recording(way)
    assert decided(ours) == decided(stock)
    assert_same_answer(stock, ours)
    text_profile = ours.profiles[0]
    if not text_profile.exists():
        return ()
    profile = Profile.read(text_profile)
    layers = tuple(profile.layers)
    assert profile.n_rows == expected_rows(layers)
    for file in ours.profiles:
        file.unlink(missing_ok=True)  # the perplexity has a context of its own, and so a placement of its own
    return layers


@pytest.mark.parametrize("context", CONTEXT)
def test_fit_decides_as_for_stock(programs, rpc_endpoint, context):
    name = f"--fit {context}, {RPC_NAME}"
    seen = set()
    for may_use in MAY_USE_MIB[context]:
        arguments = (*CONTEXT[context], "-fitt", device_mib() - may_use, *FIT, rpc_endpoint)
        seen.add(fitted_layers(programs, Way(name, arguments, through_launcher=False)))
    assert tuple(range(N_LAYERS)) in seen, "nearly no memory: every layer's experts are ours"
    assert () in seen, "memory enough: none are"
    assert len(seen) > 2 or context == "without -c", "between the two: some are"
    record_result(SHAPE, TYPE, name, "equal")


@pytest.mark.parametrize("placed, layers", [(("--cpu-moe",), (0, 1, 2)), (("--n-cpu-moe", 2), (0, 1))])
def test_fit_beside_the_users_own_placement(programs, rpc_endpoint, placed, layers):
    """fit may then shorten the context, no more (public-reports.md 18)."""
    arguments = (*placed, "-ngl", 99, "-fitt", device_mib() - MAY_USE_WITHOUT_EXPERTS_MIB, *FIT, rpc_endpoint)
    way = Way(f"--fit and {placed[0]}, {RPC_NAME}", arguments, layers=layers)
    stock, ours = programs.stock(way), programs.recording(way)
    assert decided(ours) == decided(stock)
    assert_same_answer(stock, ours)
    assert_computed(ours, layers)
    record_result(SHAPE, TYPE, way.name, "equal")
