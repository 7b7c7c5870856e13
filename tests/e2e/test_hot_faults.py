"""Whatever fails on the hot device costs the cache and no more: stock's answer bit for bit, one line that says why, a
process that ends by itself, and nothing left on the device. FakeDevice fails on demand."""

import pytest

from hot import CALLS_BEFORE_FILL, HotResult
from models import generated
from probe import assert_same_answer, decode, greedy, threads, until

N_LAYERS, N_USED = 3, 4
SLOTS = 8  # of 16
N_TENSORS = 3  # of an expert, each copied by itself
N_COPIES = N_LAYERS * SLOTS * N_TENSORS
N_IN_FLIGHT = 8  # experts that the ring has sent before the first one is known to have arrived
N_ALLOCATIONS = 1 + N_LAYERS  # a context's scratch memory, then pools
N_WARM_UPS = N_USED  # graphs that each layer is warmed up with for single tokens
STEPS = [decode(1), greedy(CALLS_BEFORE_FILL), decode(2), decode(7), greedy(8)]
TWO = [
    decode(4, context=0),
    decode(3, context=1),
    threads([greedy(8, context=0)], [greedy(8, context=1)]),
    greedy(4, context=0),
    greedy(4, context=1),
]
MANY = 100


def run(hot, fake: dict, steps=STEPS, slots: int | None = SLOTS, **options) -> HotResult:
    """With stock's answer, which is the point of it all."""
    model = generated("Q4_K")
    profile = hot.profile(model, STEPS)
    stock = hot.probe.stock(model, steps, **options)
    ours = hot.run(model, steps, profile, slots=slots, fake=fake, **options)
    assert_same_answer(stock, ours)
    return ours


def assert_told_once(result: HotResult, why: str) -> None:
    (line,) = result.complaints
    assert line.startswith("moe-hot: ")
    assert why in line
    assert "on the CPU" in line


def assert_given_back(result: HotResult) -> None:
    assert result.stats["allocated_bytes"] == 0


@pytest.fixture(scope="module")
def healthy(hot) -> HotResult:
    """The same without a fault: every fault's run must have fewer hits."""
    result = run(hot, {})
    assert result.complaints == []
    assert result.hits > 0
    assert_given_back(result)
    assert result.stats["set_async_calls"] == N_COPIES + result.stats["mul_mat_id_graphs"]
    return result


def test_every_allocation_may_fail(hot, healthy):
    """From the Nth on, for every N: one context's scratch memory and the pools of three layers."""
    for n in range(1, MANY):
        result = run(hot, {"fault": f"alloc={n}"})
        assert_given_back(result)
        if result.stats["faults"] == 0:
            break
        assert result.hits == 0
        assert_told_once(result, "no room")
    assert n - 1 == healthy.stats["allocations"] == N_ALLOCATIONS
    assert result.hits == healthy.hits


@pytest.mark.parametrize("n", range(2, N_ALLOCATIONS + 1))
def test_a_pool_that_cannot_be_had_makes_the_cache_smaller(hot, healthy, n):
    """The device gives less than it reports: the next attempt is smaller, and no complaint is due."""
    result = run(hot, {"fault": f"alloc_once={n}"})
    assert result.stats["faults"] == 1
    assert result.complaints == []
    assert 0 < result.start.slots < SLOTS
    assert 0 < result.hits < healthy.hits
    assert_given_back(result)


def test_a_limit_that_the_device_does_not_report_makes_the_cache_smaller(hot, healthy):
    result = run(hot, {"fault": "alloc_over_mib=2"})
    assert result.stats["faults"] > 0
    assert result.complaints == []
    assert 0 < result.start.slots < SLOTS
    assert 0 < result.hits < healthy.hits
    assert result.stats["peak_bytes"] <= 2 << 20
    assert_given_back(result)


def test_pools_leave_room_for_the_scratch_memory(hot):
    result = run(hot, {"fault": "alloc_over_mib=1"})
    assert result.hits > 0 or result.stats["peak_bytes"] == 0


def test_a_device_that_holds_no_expert_of_every_layer(hot):
    """The smallest real capacity: 1 MiB, less the scratch memory. Smaller ones report nothing at all."""
    reserve = {"LLAMA_ARG_MOE_HOT_CACHE_AUTO_RESERVE_MIB": 0}
    assert_told_once(run(hot, {"capacity_mib": 0, **reserve}), "no room")
    small = run(hot, {"capacity_mib": 1, **reserve})
    assert small.complaints == []
    assert small.start.slots < SLOTS
    assert small.hits > 0
    assert small.stats["peak_bytes"] <= 1 << 20


@pytest.mark.parametrize("once", ["", "_once"])
def test_every_instance_may_fail(hot, healthy, once):
    """One for the copies, one for the context."""
    for n in range(1, MANY):
        result = run(hot, {"fault": f"init{once}={n}"})
        assert_given_back(result)
        if result.stats["faults"] == 0:
            break
        assert_told_once(result, "could not create a backend")
        assert result.hits == result.stats["mul_mat_id_graphs"] == 0
    assert n - 1 == healthy.stats["instances"] == 2
    assert result.hits == healthy.hits


FIRST, SECOND, MIDDLE, LAST = 1, 2, N_COPIES // 2, N_COPIES


@pytest.mark.parametrize("once", ["", "_once"])
@pytest.mark.parametrize("n", [FIRST, SECOND, SECOND + 1, SECOND + 2, MIDDLE, LAST])
def test_a_copy_that_does_not_arrive(hot, n, once):
    """Of experts: nothing is sent once it is known, and what had been filled is not used."""
    result = run(hot, {"fault": f"copy{once}={n}"})
    assert result.stats["faults"] > 0
    assert_told_once(result, "a copy to it failed")
    assert result.hits == 0
    assert result.stats["set_async_calls"] <= n - 1 + N_IN_FLIGHT * N_TENSORS
    assert_given_back(result)


@pytest.mark.parametrize("n", [FIRST, pytest.param(MIDDLE, marks=pytest.mark.full)])
def test_a_copy_that_never_ends(hot, n):
    """What it may still write to is kept; all else is given back, and the process ends all the same."""
    result = run(hot, {"fault": f"hang={n}"})
    assert_told_once(result, "did not end")
    assert result.hits == result.stats["mul_mat_id_graphs"] == 0
    assert 0 < result.stats["allocated_bytes"] <= result.stats["peak_bytes"] / N_LAYERS + 1


@pytest.mark.parametrize("once", ["", "_once"])
@pytest.mark.parametrize("n", [1, N_WARM_UPS, N_WARM_UPS + 1, N_WARM_UPS + 2, 2 * N_WARM_UPS + 2, 40])
def test_a_computation_that_is_refused(hot, healthy, n, once):
    """While a layer is warmed up, which is done just before its first call here, or in a call, whose block is then computed on
    the CPU: the device is asked no more."""
    result = run(hot, {"fault": f"compute{once}={n}"})
    assert result.stats["faults"] == 1, "asked again"
    assert result.stats["mul_mat_id_graphs"] == n - 1
    assert (result.hits > 0) == (n > N_WARM_UPS + 1)
    assert result.hits < healthy.hits
    assert_told_once(result, "refused to compute")
    assert_given_back(result)


TWO_CONTEXTS = {"contexts": 2, "n_threads": 1, "steps": TWO}


@pytest.mark.parametrize("fault", ["compute=1", "compute_once=7", "init=2", "init=3", "copy=9"])
def test_a_fault_with_two_contexts_is_told_once(hot, fault):
    # Copies of experts only: a token's rows that do not arrive cannot be seen.
    result = run(hot, {"fault": fault, "fault_min_bytes": 8192}, **TWO_CONTEXTS)
    assert result.stats["faults"] > 0
    (line,) = result.complaints
    assert "hot cache off on FAKE0" in line
    assert_given_back(result)


STRUCK = [until("faults", 1)]
# A lane is warmed up once a token has asked for it.
ASKED = [until("allocations", N_ALLOCATIONS), greedy(60), *STRUCK]


@pytest.mark.parametrize(
    ("fault", "before_it", "why"),
    [
        ("alloc=1", STRUCK, "no room"),
        ("alloc=3", STRUCK, "no room"),
        ("init=1", STRUCK, "could not create a backend"),
        ("init=2", STRUCK, "could not create a backend"),
        ("copy=1", STRUCK, "a copy to it failed"),
        ("copy=60", STRUCK, "a copy to it failed"),
        ("compute=1", ASKED, "refused to compute"),
        ("hang=1", STRUCK, "did not end"),
    ],
)
def test_a_fault_while_the_cache_is_filled_in_the_background(hot, fault, before_it, why):
    """Small writes, a token's rows, are no occasion for the faults of copies. A fault of the fill's strikes while it is
    waited for."""
    fake = {"fault": fault, "fault_min_bytes": 8192}
    steps = [decode(1), greedy(CALLS_BEFORE_FILL), *before_it, greedy(60), decode(7), greedy(60)]
    result = run(hot, fake, steps=steps, slots=None)
    assert result.stats["faults"] > 0
    assert_told_once(result, why)
    if not fault.startswith("hang"):
        assert_given_back(result)
