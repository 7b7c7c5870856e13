"""`--moe-hot-cache auto`: no profile at first, learns, and the next session begins with what was learnt."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from conftest import shipped_model
from experts_json import as_counts
from fake import fake_environment
from hot import START, complaints, ends, plugin_lines, starts
from launcher import launch, write_fake
from learning import FREE_COPIES, MAX_MIB, UPDATE_RATE
from models import generated
from paths import PLUGIN, PROBE
from probe import assert_same_answer, decode, greedy
from processes import HANG_S
from test_profile_schema import VALIDATOR

NOBODY = 65534
BUDGET_MIB = 4
SESSION = [decode(1, seed=1), greedy(300)]


@pytest.fixture
def model(tmp_path) -> Path:
    """In a folder of its own."""
    folder = tmp_path / "models"
    folder.mkdir()
    return Path(shutil.copy(shipped_model(), folder / "small.gguf"))


def session(hot, model: Path, cache_home: Path, load_mode: str = "mmap", **environment):
    """With stock's answer, whatever is resident."""
    automatic = {MAX_MIB: BUDGET_MIB, UPDATE_RATE: "", FREE_COPIES: 1, "XDG_CACHE_HOME": cache_home} | environment
    result = hot.run(model, SESSION, "auto", environment=automatic, load_mode=load_mode)
    assert_same_answer(hot.probe.stock(model, SESSION), result)
    assert result.hits > 0
    return result


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_first_start_needs_no_profile_and_the_second_hits_more(hot, model, tmp_path):
    first = session(hot, model, tmp_path / "cache")
    profile = model.with_name("small.gguf.experts.json")
    assert first.start.expected is None
    (line,) = filter(START.search, plugin_lines(first.log))
    assert line.endswith(f"nothing is learnt yet; profile: {profile}"), line
    assert first.complaints == []
    assert names(model.parent) == ["small.gguf", profile.name]
    assert not (tmp_path / "cache").exists()
    VALIDATOR.validate(json.loads(profile.read_text()))
    n_before = n_requests(profile)
    second = session(hot, model, tmp_path / "cache")
    assert second.start.expected > 0
    assert second.complaints == []
    assert second.end.hit_rate > first.end.hit_rate
    assert n_requests(profile) > 1.5 * n_before


def test_a_fixed_set_begins_with_what_is_there_and_leaves_it(hot, model, tmp_path):
    nothing = hot.run(model, SESSION, "auto", environment={MAX_MIB: BUDGET_MIB, "XDG_CACHE_HOME": tmp_path / "cache"})
    assert nothing.hits == 0
    assert names(model.parent) == ["small.gguf"]
    session(hot, model, tmp_path / "cache")
    profile = model.with_name("small.gguf.experts.json")
    before = profile.read_bytes()
    fixed = session(hot, model, tmp_path / "cache", **{UPDATE_RATE: 0})
    assert fixed.start.expected > 0
    assert profile.read_bytes() == before


@pytest.mark.parametrize("text", ["not a profile", '{"schema": "llama.cpp.moe_layer_perf.v1", "lay', "another model's"])
def test_a_file_that_is_not_the_models_profile_stays(hot, model, tmp_path, text):
    """What is learnt is kept in the user's cache directory then."""
    beside = model.with_name("small.gguf.experts.json")
    if text == "another model's":
        shutil.copy(hot.profile(generated("Q4_K"), [decode(1), greedy(20)]), beside)
    else:
        beside.write_text(text)
    before = beside.read_bytes()
    first = session(hot, model, tmp_path / "cache")
    (kept,) = (tmp_path / "cache/moe-hot").iterdir()
    assert kept.name.startswith("small.gguf.experts-")
    (complaint,) = complaints(first.log)
    assert str(beside) in complaint and complaint.endswith(f"this profile is kept in {kept}"), complaint
    assert beside.read_bytes() == before
    second = session(hot, model, tmp_path / "cache")
    assert second.start.expected > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_folder_that_cannot_be_written_to():
    """The profile that is there is begun with; what is learnt goes to the user's cache directory, which wins from then on."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are its user's alone
        Path(name).chmod(0o755)
        somebody_elses_folder(Path(name))


def somebody_elses_folder(place: Path):
    home, out, models = place / "home", place / "out", place / "models"
    for folder in (home, out):
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
    models.mkdir()
    model = Path(shutil.copy(shipped_model(), models / "small.gguf"))

    def start(name: str):
        folder = out / name
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        (folder / "run.json").write_text(json.dumps({"model": str(model), "steps": SESSION}))
        ours = {"LLAMA_ARG_MOE_HOT_CACHE": "auto", MAX_MIB: BUDGET_MIB, FREE_COPIES: 1, "HOME": home}
        environment = fake_environment(plugin=PLUGIN, stats=folder / "stats", **ours)
        environment.pop("XDG_CACHE_HOME", None)
        command = [PROBE, folder / "run.json", folder]
        done = subprocess.run(command, env=environment, user=NOBODY, group=NOBODY, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return done.stderr

    first = start("first")
    (kept,) = (home / ".cache/moe-hot").iterdir()
    (complaint,) = complaints(first)
    assert complaint.endswith(f"this profile is kept in {kept}")
    assert starts(first)[0].expected is None
    again = start("again")
    assert starts(again)[0].expected > 0
    assert ends(again)[0].hit_rate > ends(first)[0].hit_rate
    assert names(model.parent) == ["small.gguf"]
    # One that came with the model.
    shutil.copyfile(kept, model.with_name("small.gguf.experts.json"))
    kept.unlink()
    shipped = start("shipped")
    assert starts(shipped)[0].expected > 0
    assert kept.exists()


def test_the_users_name_for_the_model_counts(hot, model, tmp_path):
    """A symbolic link, as tools make them that keep models by their content; and weights that are not mapped."""
    content = model.rename(tmp_path / "0123abcd")
    model.symlink_to(content)
    of_another = session(hot, model, tmp_path / "cache", MOE_HOT_MODEL_FILE=generated("Q4_K"))
    assert of_another.start.expected is None
    (tmp_path / "0123abcd.experts.json").unlink()  # where the map leads
    for load_mode in ("mmap", "none"):
        named = session(hot, model, tmp_path / "cache", MOE_HOT_MODEL_FILE=model, load_mode=load_mode)
        assert names(model.parent) == ["small.gguf", "small.gguf.experts.json"]
        assert (named.start.expected is None) == (load_mode == "mmap")
    unknown = session(hot, model, tmp_path / "cache", load_mode="none")
    assert unknown.start.expected is None
    (kept,) = (tmp_path / "cache/moe-hot").iterdir()
    assert kept.name.startswith("model.experts-")


def test_a_recording_into_the_models_own_profile_adds_to_it(hot, model, tmp_path):
    """Also in a session that ends before the cache is filled."""
    session(hot, model, tmp_path / "cache")
    profile = model.with_name("small.gguf.experts.json")
    before = n_requests(profile)
    ours = {"XDG_CACHE_HOME": tmp_path / "cache", "LLAMA_ARG_MOE_LAYER_PERF_OUT": profile, UPDATE_RATE: ""}
    hot.run(model, [decode(1)], "auto", environment=ours)
    assert names(model.parent) == ["small.gguf", profile.name]
    assert n_requests(profile) > 0.9 * before


def n_requests(profile: Path) -> int:
    return sum(sum(as_counts(layer["experts"]).values()) for layer in json.loads(profile.read_text())["layers"])


def test_a_profile_that_names_no_model_is_begun_with(hot, model, tmp_path):
    beside = model.with_name("small.gguf.experts.json")
    raw = json.loads(hot.profile(model, [decode(1), greedy(20)]).read_text())
    beside.write_text(json.dumps({"schema": raw["schema"], "layers": raw["layers"]}))
    before = beside.read_bytes()
    first = session(hot, model, tmp_path / "cache")
    assert first.start.expected > 0
    (complaint,) = complaints(first.log)
    assert "names no model" in complaint
    assert beside.read_bytes() == before
    assert len(list((tmp_path / "cache/moe-hot").iterdir())) == 1


def test_the_launcher_asks_for_no_file_of_that_name(tmp_path):
    program = write_fake(tmp_path / "llama-fake")
    started = launch(program, "-m", generated("Q4_K"), "--moe-hot-cache", "auto").started
    assert started["environment"]["LLAMA_ARG_MOE_HOT_CACHE"] == "auto"
    assert started["environment"]["MOE_HOT_MODEL_FILE"] == str(generated("Q4_K"))
    (tmp_path / "auto").write_text("not a profile")
    answer = launch(program, "--moe-hot-cache", tmp_path / "auto")
    assert answer.code == 2 and "is not JSON" in answer.err
