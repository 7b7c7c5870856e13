"""Ways in through llama-server: a draft model beside the main one, router mode, a model unloaded and loaded again,
embeddings. Every model's profile is a file of its own."""

import pytest

from experts_json import Profile
from models import generated
from probe import decode
from results import record_result
from server import START_UP
from ways import SHAPE, plugin_lines, thread_names
from ways_server import ask, post, router_states, serve, unload, wait_for_sleep

MAIN_TYPE, OTHER_TYPE = "Q4_K", "F16"
SHORT = "Once upon a"
LONG = "The expert tensors of a layer stay where they are; what moves is the routing. " * 4
DRAFT = ["--spec-type", "draft-simple", "--spec-draft-n-max", 4]
SLEEP = ["--sleep-idle-seconds", 2]  # longer than the client ever pauses


@pytest.fixture
def out_file(tmp_path):
    folder = tmp_path / "profiles"
    folder.mkdir()
    return folder / "experts.json"


def profiles(out_file) -> dict[str, Profile]:
    return {path.name: Profile.read(path) for path in out_file.parent.iterdir()}


def identity(probe, type_name: str) -> dict:
    """What a profile of that model alone says of it."""
    return probe.recording(generated(type_name), [decode(1)]).profile.raw["model"]


def rows(answers: list) -> dict[int, int]:
    """Tokens that each of three layers saw; prompts of 32 tokens and more are stock's, but for their last row."""
    answers = [START_UP, *answers]
    first = sum((a.n_prompt if a.n_prompt < 32 else 0) + a.n_decoded for a in answers)
    return {0: first, 1: first, 2: sum(1 + a.n_decoded for a in answers)}


def converse(server, **more) -> list:
    return [ask(server, prompt, n, **more) for prompt, n in ((SHORT, 40), (LONG, 16), ("x", 8))]


@pytest.mark.parametrize("dense", ["CPU", "RPC"])
@pytest.mark.parametrize("draft_type", [OTHER_TYPE, MAIN_TYPE], ids=["another model", "the same file"])
def test_a_draft_model(probe, tmp_path, out_file, request, draft_type, dense):
    """Two MoE models in one process. The main model's profile is the file that was asked for."""
    arguments = ["-m", generated(MAIN_TYPE), "-md", generated(draft_type), "--cpu-moe", "--spec-draft-cpu-moe", *DRAFT]
    if dense == "RPC":
        arguments += ["--rpc", request.getfixturevalue("rpc_endpoint"), "-ngl", 99, "-ngld", 99]
    with serve(tmp_path, arguments) as server:
        stock = converse(server)
    with serve(tmp_path, arguments, out_file) as server:
        ours = converse(server)
        assert "moe-hot-save" in thread_names(server.child.pid)
        server.stop()
    assert ours == stock
    assert sum(answer.n_accepted for answer in ours) > 0, "no draft was of use"
    main = Profile.read(out_file)
    (draft,) = (profile for name, profile in profiles(out_file).items() if name != out_file.name)
    assert main.raw["model"] == identity(probe, MAIN_TYPE)
    assert draft.raw["model"] == identity(probe, draft_type)
    assert n_calls(main, "batch_2_up") > n_calls(main, "batch_1"), "the main model checks several tokens at once"
    assert n_calls(draft, "batch_1") > n_calls(draft, "batch_2_up"), "the draft makes them one at a time"
    record_result(SHAPE, MAIN_TYPE, f"draft model ({draft_type}), dense on {dense}", "equal")


def n_calls(profile: Profile, batch_class: str) -> int:
    return sum(classes.get(batch_class, {"calls": 0})["calls"] for classes in profile.by_batch_size.values())


@pytest.fixture(params=["--models-dir", "--models-preset"])
def router_arguments(request, tmp_path) -> list:
    """A router over the models "main" and "other"."""
    models = {"main": generated(MAIN_TYPE), "other": generated(OTHER_TYPE)}
    if request.param == "--models-dir":
        folder = tmp_path / "models"
        folder.mkdir()
        for name, path in models.items():
            (folder / f"{name}.gguf").symlink_to(path)
        return [request.param, folder]
    preset = tmp_path / "models.ini"
    preset.write_text("version = 1\n" + "".join(f"[{name}]\nmodel = {path}\n" for name, path in models.items()))
    return [request.param, preset]


def test_router_mode(probe, tmp_path, out_file, router_arguments):
    """public-reports.md 19: what the user gave reaches the processes that compute, and the parent does nothing."""
    with serve(tmp_path, router_arguments) as server:
        stock = {name: converse(server, model=name) for name in ("main", "other")}
    with serve(tmp_path, router_arguments, out_file) as server:
        ours = {name: converse(server, model=name) for name in ("main", "other")}
        assert router_states(server).items() >= {"main": "loaded", "other": "loaded"}.items()
        assert not any(name.startswith("moe-hot") for name in thread_names(server.child.pid))
        server.stop()
    assert ours == stock
    written = profiles(out_file)
    assert len(written) == 2
    by_model = {profile.raw["model"]["fingerprint"]: profile for profile in written.values()}
    for name, type_name in (("main", MAIN_TYPE), ("other", OTHER_TYPE)):
        assert by_model[identity(probe, type_name)["fingerprint"]].n_rows == rows(ours[name])
    parent = [line for line in plugin_lines(server.log.read_text(errors="replace")) if not line.startswith("[")]
    assert parent == [], "the parent has nothing to say"
    record_result(SHAPE, MAIN_TYPE, f"router mode, {router_arguments[0]}", "equal")


def test_a_router_unloads_a_model_and_loads_it_again(tmp_path, out_file, router_arguments):
    """The second time it is another process: a run of its own, whose profile goes beside the first."""
    with serve(tmp_path, router_arguments, out_file) as server:
        before = ask(server, SHORT, 40, model="main")
        unload(server, "main")
        assert Profile.read(out_file).n_rows == rows([before])
        after = [ask(server, SHORT, 40, model="main"), ask(server, SHORT, 5, model="main")]
        server.stop()
    assert after[0] == before
    assert Profile.read(out_file).n_rows == rows([before])
    (second,) = set(profiles(out_file)) - {out_file.name}
    assert Profile.read(out_file.with_name(second)).n_rows == rows(after)


def test_a_model_unloaded_and_loaded_again_in_one_process(tmp_path, out_file):
    """The server sleeps, which frees the model, and wakes up twice: counts go on in the same profile."""
    model = ["-m", generated(MAIN_TYPE)]
    with serve(tmp_path, model) as server:
        stock = [converse(server) for _ in range(3)]
    ours = []
    with serve(tmp_path, [*model, *SLEEP], out_file) as server:
        for _ in range(3):
            ours.append(converse(server))
            wait_for_sleep(server)
            assert "moe-hot-save" not in thread_names(server.child.pid), "a thread outlives the last context"
        assert server.log.read_text(errors="replace").count("recording expert usage") == 1
        server.stop()
    assert ours == stock
    assert list(profiles(out_file)) == [out_file.name]
    lives = [rows(answers) for answers in ours]
    assert Profile.read(out_file).n_rows == {layer: sum(life[layer] for life in lives) for layer in range(3)}
    record_result(SHAPE, MAIN_TYPE, "unloaded and loaded again (--sleep-idle-seconds)", "equal")


@pytest.mark.parametrize("draft_type", [OTHER_TYPE, MAIN_TYPE], ids=["another model", "the same file"])
def test_two_models_unloaded_and_loaded_again(tmp_path, out_file, draft_type):
    """Each goes on in its own profile, also where both are of one file: two equal lives, twice the counts of one."""
    arguments = ["-m", generated(MAIN_TYPE), "-md", generated(draft_type), *DRAFT, *SLEEP]
    with serve(tmp_path, arguments, out_file) as server:
        first_answers = converse(server)
        wait_for_sleep(server)
        first = requests_by_batch_size(out_file)
        assert converse(server) == first_answers
        server.stop()
    assert len({file for file, *_ in first}) == 2
    assert requests_by_batch_size(out_file) == {key: 2 * n for key, n in first.items()}


def requests_by_batch_size(out_file) -> dict[tuple, int]:
    """{(file, layer, batch class, expert): requests}"""
    return {
        (name, layer, batch_class, expert): n
        for name, profile in profiles(out_file).items()
        for layer, classes in profile.by_batch_size.items()
        for batch_class, counts in classes.items()
        for expert, n in counts["experts"].items()
    }


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_embeddings(tmp_path, out_file, pooling):
    """Numbers, all their digits. Every token of a batch has an output, in the last layer too."""
    arguments = ["-m", generated(MAIN_TYPE), "--embeddings", "--pooling", pooling, "--embd-normalize", -1]
    texts = [SHORT, "x", "Another text", LONG]

    def embed(server) -> list:
        return [post(server, "/embedding", {"content": text})[0]["embedding"] for text in texts]

    with serve(tmp_path, arguments) as server:
        stock = embed(server)
    with serve(tmp_path, arguments, out_file) as server:
        ours = embed(server)
        server.stop()
    assert ours == stock
    assert len({str(embedding) for embedding in ours}) == len(texts)
    profile = Profile.read(out_file)
    assert profile.layers == [0, 1, 2]
    assert profile.layer_calls >= 3 * (len(texts) - 1)
    record_result(SHAPE, MAIN_TYPE, f"--embeddings --pooling {pooling}", "equal")
