"""A profile of another quantisation of the same model is a good start, and is said to be one; another model's is refused with
what differs."""

import json
import shutil
from pathlib import Path

import pytest

from experts_json import Profile
from hot import complaints
from launcher import assert_refused, launch, write_fake
from learning import MISS, UPDATE_RATE
from models import generated
from probe import assert_same_answer, decode, greedy

RECORDED, STEPS = [decode(1), greedy(100)], [decode(1), greedy(80)]
SLOTS = 8
SAYS = "was recorded from another quantisation of this model"
KEPT = "what is learnt is saved there"
CACHE = "--moe-hot-cache"


@pytest.fixture
def profile(hot, tmp_path) -> Path:
    """One's own copy, recorded from the model as Q8_0."""
    return Path(shutil.copy(hot.profile(generated("Q8_0"), RECORDED), tmp_path / "experts.json"))


@pytest.fixture
def program(tmp_path) -> Path:
    return write_fake(tmp_path / "llama-fake")


def edited(profile: Path, edit) -> Path:
    raw = json.loads(profile.read_text())
    edit(raw)
    profile.write_text(json.dumps(raw))
    return profile


def without_shapes(raw: dict) -> None:
    """As earlier versions wrote it."""
    del raw["model"]["shapes"]


@pytest.mark.parametrize("edit", [lambda _: None, without_shapes], ids=["as written", "without shapes"])
def test_it_serves_and_one_line_says_so(hot, profile, edit):
    before = edited(profile, edit).read_bytes()
    result = hot.run(generated("Q4_K"), STEPS, profile, SLOTS)
    assert_same_answer(hot.probe.stock(generated("Q4_K"), STEPS), result)
    assert result.hits > 0
    (line,) = complaints(result.log)
    assert SAYS in line and str(profile) in line and KEPT not in line
    assert profile.read_bytes() == before


def test_what_is_learnt_makes_it_this_models_profile(hot, profile):
    """And so it goes to and fro between two quantisations."""
    learns, earlier = {UPDATE_RATE: 1, MISS: "copy"}, json.loads(profile.read_text())
    for type_name, has_line in (("Q4_K", True), ("Q4_K", False), ("Q8_0", True)):
        result = hot.run(generated(type_name), STEPS, profile, SLOTS, environment=learns)
        lines = complaints(result.log)
        assert len(lines) == has_line and all(SAYS in line and KEPT in line for line in lines)
        now = json.loads(profile.read_text())
        own = hot.probe.recording(generated(type_name), [decode(1)]).profile.raw["model"]
        assert now["model"] == own
        for layer, before in zip(now["layers"], earlier["layers"], strict=True):
            assert sum(n for _, n in layer["experts"]) > sum(n for _, n in before["experts"])
        assert all(layer["ranks"] and layer["resident"] for layer in now["moe_hot"]["layers"])
        earlier = now


@pytest.mark.parametrize("by_link", [False, True], ids=["one name", "a link"])
def test_one_file_for_both_flags_becomes_this_models(hot, profile, tmp_path, by_link):
    output = profile
    if by_link:
        output = tmp_path / "link.json"
        output.symlink_to(profile)
    learns = {UPDATE_RATE: 1, MISS: "copy", "LLAMA_ARG_MOE_LAYER_PERF_OUT": output}
    result = hot.run(generated("Q4_K"), STEPS, profile, SLOTS, environment=learns)
    (line,) = complaints(result.log)
    assert SAYS in line and KEPT in line
    now = json.loads(profile.read_text())
    assert now["model"] == hot.probe.recording(generated("Q4_K"), [decode(1)]).profile.raw["model"]
    assert all(layer["ranks"] and layer["resident"] for layer in now["moe_hot"]["layers"])
    assert len([*tmp_path.glob("*.json")]) == 1 + by_link


def test_a_recording_does_not_replace_it(probe, profile):
    """A recording starts from zero: it would end the other one's."""
    before = profile.read_bytes()
    probe.recording(generated("Q4_K"), RECORDED, profile)
    assert profile.read_bytes() == before
    (beside,) = profile.parent.glob("experts-*.json")
    assert Profile.read(beside).layer_calls > 0


def test_the_launcher_says_it_and_the_plugin_does_not_again(program, profile):
    answer = launch(program, "-m", generated("Q4_K"), CACHE, profile)
    assert answer.code == 0
    (line,) = answer.err.splitlines()
    assert line.startswith("moe-hot: ") and SAYS in line and KEPT in line and str(profile) in line
    assert answer.started["environment"]["MOE_HOT_SAID_QUANTISATION"] == "1"
    same = launch(program, "-m", generated("Q8_0"), CACHE, profile)
    assert same.err == "" and "MOE_HOT_SAID_QUANTISATION" not in same.started["environment"]


def test_what_the_launcher_has_said_is_not_said_again(hot, profile):
    result = hot.run(generated("Q4_K"), STEPS, profile, SLOTS, environment={"MOE_HOT_SAID_QUANTISATION": 1})
    assert result.hits > 0 and complaints(result.log) == []


def more_used(raw: dict) -> None:
    for layer in raw["moe_hot"]["layers"]:
        layer["n_expert_used"] += 1


def more_experts(raw: dict) -> None:
    for layer in raw["moe_hot"]["layers"]:
        layer["n_expert"] *= 2


def a_layer_less(raw: dict) -> None:
    for layers in (raw["layers"], raw["moe_hot"]["layers"]):
        layers.pop()


def another_layer(raw: dict) -> None:
    for layers in (raw["layers"], raw["moe_hot"]["layers"]):
        layers.append(layers[0] | {"layer": 77})


def another_name(raw: dict) -> None:
    tensors = raw["model"]["tensors"]
    tensors["blk.0.ffn_gate_up_exps.weight"] = tensors.pop("blk.0.ffn_gate_exps.weight")


def another_shape(raw: dict) -> None:
    raw["model"]["shapes"]["blk.1.ffn_up_exps.weight"][1] += 32


# What differs: what the launcher says, and the plugin, which knows only the layers that it was given.
OTHERS = {
    more_used: ("experts per token in layer 0, not", True),
    more_experts: ("experts in layer 0, not", True),
    a_layer_less: ("layer 2, and the profile does not know that layer", True),
    another_layer: ("no experts in layer 77", False),
    another_name: ("tensor blk.0.ffn_gate_exps.weight is in the model only", True),
    another_shape: ("tensor blk.1.ffn_up_exps.weight is [", True),
}


@pytest.mark.parametrize("edit", OTHERS, ids=lambda edit: edit.__name__)
def test_another_models_is_refused_with_what_differs(hot, program, profile, edit):
    said, by_plugin = OTHERS[edit]
    edited(profile, edit)
    answer = launch(program, "-m", generated("Q4_K"), CACHE, profile)
    assert_refused(answer, str(profile), "recorded from another model", said)
    if by_plugin:
        result = hot.run(generated("Q4_K"), STEPS, profile, SLOTS)
        assert_same_answer(hot.probe.stock(generated("Q4_K"), STEPS), result)
        (line,) = complaints(result.log)
        assert "recorded from another model" in line and said in line
