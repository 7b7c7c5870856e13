"""The endpoints of the patched llama-server: while tokens are decoded, with a key, with bad input, and after the model is gone."""

import fcntl
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

import paths
from conftest import shipped_model
from experts_json import Profile
from fake import FAKE_DEVICE, fake_environment
from models import generated
from patched import needs_build
from patched_server import KEY, N_EXPERT, N_LAYERS, SLOTS, call, complete, serve, serve_with_cache
from processes import stock_environment, wait_for
from server import Server

pytestmark = needs_build
PERF, CACHE, METRICS = "/moe-layer-perf", "/moe-hot-cache", "/metrics"


def snapshot(server: Server, path: str = PERF) -> dict:
    answer = call(server, "GET", path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_error(answer: requests.Response, status: int, kind: str, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (status, kind) and said in error["message"], error


def metrics(server: Server) -> dict[str, float]:
    """By name and label; every line is one that Prometheus reads."""
    found = {}
    for line in call(server, "GET", METRICS).text.splitlines():
        if line and not line.startswith(("# HELP ", "# TYPE ")):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def requests_of(view: dict) -> int:
    return sum(layer["hot_slots_total"] + layer["cold_slots_total"] for layer in view["layers"])


def test_a_snapshot_counts_what_was_decoded(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile) as server:
        answer = complete(server, 40)
        first = snapshot(server)
        assert (len(first["layers"]), first["mode"], first["enabled"]) == (N_LAYERS, "update", True)
        assert first["cache"] | {"copies": 0, "copied_bytes": 0} == {
            "on": True, "device": FAKE_DEVICE, "why": "", "slots": N_LAYERS * SLOTS, "resident": N_LAYERS * SLOTS,
            "copies": 0, "copied_bytes": 0,
        }  # fmt: skip
        assert first["cache"]["copies"] == N_LAYERS * SLOTS
        assert all(len(layer["resident"]) == layer["slots"] == SLOTS for layer in first["layers"])
        assert first["options"]["--moe-hot-cache"] == str(own_profile)
        assert first["options"]["--moe-hot-cache-miss"] == "auto"
        # The request's own hit rate: it was alone.
        ours = answer["timings"]["moe_hot"]
        assert 0 < ours["requests"] <= requests_of(first)
        assert ours["hit_rate"] == pytest.approx(ours["hits"] / ours["requests"]) and ours["hits"] > 0
        complete(server, 20)
        assert requests_of(snapshot(server)) > requests_of(first)
        server.stop()


def test_modes_show_more_or_nothing_and_begin_to_count_anew(tmp_path, own_profile):
    out_file = tmp_path / "recorded.json"
    with serve_with_cache(tmp_path, own_profile, "--moe-layer-perf-out", out_file) as server:
        total = complete(server, 30)["timings"]["moe_hot"]["requests"]
        for mode in ("full", "update", "off", "full"):
            answer = call(server, "POST", PERF, {"mode": mode})
            assert answer.status_code == 200 and answer.json()["mode"] == mode
            assert requests_of(answer.json()) == 0
            total += complete(server, 10)["timings"]["moe_hot"]["requests"]
            view = snapshot(server)
            assert (requests_of(view) > 0) == (mode != "off") == view["enabled"]
            assert all(("cpu_us" in layer) == (mode == "full") for layer in view["layers"])
        assert sum(layer["cpu_us"] for layer in view["layers"]) > 0
        assert sum(layer["device_us"] for layer in view["layers"]) > 0
        server.stop()
    layers = Profile.read(out_file, cached=True).raw["layers"]
    assert sum(count for layer in layers for _, count in layer["experts"]) >= total, "the file has everything"


# body, and what the message says.
BAD_BODIES = {
    PERF: [
        ("", "expected"), ("{", "expected"), ("[]", "expected"), ("{}", "mode"), ('{"mode": 1}', "mode"),
        ('{"mode": "on"}', "full"), ('{"mode": "full", "x": 1}', "x"), ("\xff", "expected"), ("[" * 100_000, "expected"),
    ],
    CACHE: [
        ("", "is empty"), ("{", "profile: "), ("{}", "schema"), ("[]", "profile: "), ('{"profile": 1}', "profile: "),
        ('{"profile": {}, "save_to_disk": "yes"}', "profile: "), ("[" * 100_000, "profile: "),
        ('{"schema": "other.v9", "layers": []}', "other.v9"),
    ],
}  # fmt: skip


def test_bad_input_is_refused_in_the_servers_own_format(tmp_path, own_profile):
    hostile = paths.REPOSITORY / "tests/hostile"
    with serve_with_cache(tmp_path, own_profile) as server:
        before = complete(server, 30)["content"]
        for path, bodies in BAD_BODIES.items():
            for body, said in bodies:
                assert_error(call(server, "POST", path, body.encode("latin-1")), 400, "invalid_request_error", said)
        for file, refusal in json.loads((hostile / "expected.json").read_text()).items():
            text = (hostile / file).read_bytes()
            answer = call(server, "POST", CACHE, text)
            assert_error(answer, 400, "invalid_request_error")
            assert all(said in answer.json()["error"]["message"] for said in refusal["says"]), answer.text
            assert_error(call(server, "POST", CACHE, b'{"profile":' + text + b"}"), 400, "invalid_request_error")
        other = {"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 99, "experts": [[0, 1]]}]}
        assert_error(call(server, "POST", CACHE, other), 400, "invalid_request_error", "layer 99")
        for method, path in [("PUT", PERF), ("DELETE", PERF), ("GET", CACHE), ("DELETE", CACHE), ("POST", "/moe")]:
            assert_error(call(server, method, path, "{}"), 404, "not_found_error")
        large = {"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[0, 1]] * 1_300_000}]}
        assert len(json.dumps(large)) > 10_000_000
        assert_error(call(server, "POST", CACHE, large), 400, "invalid_request_error")
        assert_error(call(server, "POST", PERF, "x" * 10_000_000), 400, "invalid_request_error")
        assert complete(server, 30)["content"] == before
        server.stop()
    assert Profile.read(own_profile).raw["layers"], "still whole"


def test_a_key_protects_everything_but_the_page(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile, "--api-key", KEY) as server:
        for method, path in [("GET", PERF), ("POST", PERF), ("POST", CACHE), ("GET", METRICS)]:
            assert_error(call(server, method, path, "{}"), 401, "authentication_error")
        answer = call(server, "GET", PERF, Authorization=f"Bearer {KEY}")
        assert answer.status_code == 200 and answer.json()["schema"]
        page = call(server, "GET", "/moe")
        assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
        assert str(own_profile) not in page.text
        server.stop()


def reversed_profile(profile: Path) -> dict:
    """The least used experts become the most used."""
    raw = json.loads(profile.read_text())
    layers = []
    for layer in raw["layers"]:
        counts = dict(layer["experts"])
        most = max(counts.values()) + 1
        layers.append({"layer": layer["layer"], "experts": [[n, most - counts.get(n, 0)] for n in range(N_EXPERT)]})
    return {"schema": raw["schema"], "n_expert": N_EXPERT, "layers": layers, "model": raw["model"]}


def residents(server: Server) -> list:
    return [layer["resident"] for layer in snapshot(server)["layers"]]


def test_a_profile_is_applied_while_the_server_runs(tmp_path, own_profile):
    new, old = reversed_profile(own_profile), own_profile.read_bytes()
    with serve_with_cache(tmp_path, own_profile) as server:
        text = complete(server, 30)["content"]
        before = residents(server)
        answer = call(server, "POST", CACHE, new)
        assert answer.status_code == 200 and answer.json() == {"applied": True, "layers": N_LAYERS}
        assert complete(server, 30)["content"] == text
        after = residents(server)
        assert all(a != b and len(b) == SLOTS for a, b in zip(before, after, strict=True))
        wanted = [sorted(sorted(layer["experts"], key=lambda pair: (-pair[1], pair[0]))[:SLOTS]) for layer in new["layers"]]
        assert after == [[n for n, _ in layer] for layer in wanted]
        assert own_profile.read_bytes() == old, "the file is as it was"
        answer = call(server, "POST", CACHE, {"profile": new, "save_to_disk": True})
        assert answer.json()["saved_to"] == str(own_profile) and answer.json()["old_kept_as"] == f"{own_profile}.bak"
        assert json.loads(own_profile.read_bytes()) == new and Path(f"{own_profile}.bak").read_bytes() == old
        assert call(server, "POST", CACHE, new | {"save_to_disk": True}).status_code == 200
        assert json.loads(own_profile.read_bytes()) == json.loads(Path(f"{own_profile}.bak").read_bytes()) == new
        assert complete(server, 30)["content"] == text
        for _ in range(70):  # more often than adapters may come and go
            assert call(server, "POST", CACHE, new).status_code == 200
            complete(server, 4)
        assert snapshot(server)["cache"]["on"]
        server.stop()


def test_a_file_that_another_program_writes_to_is_not_replaced(tmp_path, own_profile):
    before = own_profile.read_bytes()
    with serve_with_cache(tmp_path, own_profile) as server, open(own_profile, "r+b") as held:
        complete(server, 5)
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = call(server, "POST", CACHE, {"profile": reversed_profile(own_profile), "save_to_disk": True})
        assert_error(refused, 503, "unavailable_error", "another program writes to it")
        assert own_profile.read_bytes() == before
        server.stop()


def test_a_cache_that_was_given_up_is_tried_again_when_a_profile_is_applied(tmp_path, own_profile):
    """FakeDevice takes a second for each graph: the cache is given up each time, and one line says so each time."""
    slow = fake_environment(latency_us=20_000, MOE_HOT_TEST_NO_GUARD=0, LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB=64)

    def n_given_up() -> int:
        return server.log.read_text(errors="replace").count("hot cache of this model off")

    with serve_with_cache(tmp_path, own_profile, environment=slow) as server:
        wait_for("it is given up", lambda: complete(server, 30) and n_given_up() == 1)
        assert call(server, "POST", CACHE, json.loads(own_profile.read_text())).status_code == 200
        wait_for("it is given up again", lambda: complete(server, 30) and n_given_up() == 2)
        server.stop()


def test_what_is_learnt_after_a_profile_was_applied_is_added_to_the_file(tmp_path, own_profile):
    """Not to the one that was applied, which the file does not hold."""
    earlier = Profile.read(own_profile)
    few = json.loads(own_profile.read_text())
    for layer in few["layers"]:
        layer["experts"] = layer["experts"][:1]
    learning = fake_environment(LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB="64")
    with serve_with_cache(tmp_path, own_profile, environment=learning) as server:
        complete(server, 30)
        assert call(server, "POST", CACHE, few).status_code == 200
        complete(server, 30)
        server.stop()
    learnt = json.loads(own_profile.read_text())
    asked_for = {layer["layer"]: {n for n, _ in layer["experts"]} for layer in learnt["layers"]}
    assert all({n for n, _ in layer["experts"]} <= asked_for[layer["layer"]] for layer in earlier.raw["layers"])
    assert learnt != few


def test_fifty_calls_at_once_while_tokens_are_decoded(tmp_path, own_profile):
    new = reversed_profile(own_profile)
    calls = [
        lambda server: call(server, "GET", PERF),
        lambda server: call(server, "POST", PERF, {"mode": "full"}),
        lambda server: call(server, "POST", CACHE, new),
        lambda server: call(server, "GET", METRICS),
        lambda server: call(server, "GET", "/moe"),
    ]
    with serve_with_cache(tmp_path, own_profile) as server:
        text = complete(server, 200)["content"]
        texts = []
        decoding = threading.Thread(target=lambda: texts.append(complete(server, 200)["content"]))
        decoding.start()
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda n: calls[n % len(calls)](server), range(50)))
        decoding.join()
        assert [answer.status_code for answer in answers] == [200] * 50
        assert texts == [text]
        server.stop()


def test_metrics_never_go_back(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile) as server:
        complete(server, 30)
        first = metrics(server)
        assert first["moe_hot:requests_total"] == first["moe_hot:hits_total"] + first["moe_hot:misses_total"] > 0
        assert first["moe_hot:copies_total"] == first["moe_hot:resident_experts"] == N_LAYERS * SLOTS
        assert first["moe_hot:copied_bytes_total"] > 0
        assert first['moe_hot:lane_seconds_total{lane="cpu"}'] > 0
        assert first['moe_hot:lane_seconds_total{lane="device"}'] > 0
        assert "llamacpp:prompt_tokens_total" in first
        call(server, "POST", PERF, {"mode": "off"})
        complete(server, 5)
        second = metrics(server)
        counters = [name for name in first if name.startswith("moe_hot:") and "_total" in name]
        assert len(counters) >= 8 and all(second[name] >= first[name] for name in counters)
        assert second["moe_hot:requests_total"] > first["moe_hot:requests_total"]
        server.stop()


def test_a_model_that_was_unloaded_is_still_answered_for(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile, "--sleep-idle-seconds", 1) as server:
        text = complete(server, 30)["content"]
        wait_for("the server sleeps", lambda: call(server, "GET", "/props").json()["is_sleeping"])
        assert requests_of(snapshot(server)) > 0
        assert_error(call(server, "POST", CACHE, reversed_profile(own_profile)), 503, "unavailable_error", "no model is loaded")
        assert call(server, "POST", PERF, {"mode": "update"}).status_code == 200
        assert metrics(server)["moe_hot:requests_total"] > 0
        assert complete(server, 30)["content"] == text
        assert requests_of(snapshot(server)) > 0
        server.stop()


def test_without_a_cache_there_is_nothing_to_apply(tmp_path, own_profile):
    arguments = ["-m", shipped_model(), "--moe-layer-perf-out", tmp_path / "out.json"]
    with serve(tmp_path, *arguments, environment=stock_environment()) as server:
        complete(server, 5)
        refused = call(server, "POST", CACHE, json.loads(own_profile.read_text()))
        assert_error(refused, 501, "not_supported_error", "--moe-hot-cache")
        view = snapshot(server)
        assert not view["cache"]["on"] and "only recording" in view["cache"]["why"] and requests_of(view) > 0
        server.stop()


def test_a_routers_children_have_options_and_endpoints_of_their_own(tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("main", "other")}
    models = {"main": shipped_model(), "other": generated("F16")}
    preset = tmp_path / "models.ini"
    sections = (f"[{name}]\nmodel = {models[name]}\nmoe-layer-perf-out = {files[name]}\n" for name in models)
    preset.write_text("version = 1\n" + "".join(sections))
    with serve(tmp_path, "--models-preset", preset, environment=stock_environment()) as server:
        for name in models:
            complete(server, 5, model=name)
            view = snapshot(server, f"{PERF}?model={name}")
            assert view["options"]["--moe-layer-perf-out"] == str(files[name]) and requests_of(view) > 0
            assert call(server, "POST", PERF, {"mode": "off", "model": name}).json()["mode"] == "off"
            assert call(server, "GET", f"/moe?model={name}").text.startswith("<!doctype html>")
        assert call(server, "GET", PERF).status_code == 400, "which model?"
        assert "moe_hot" not in Path(f"/proc/{server.child.pid}/maps").read_text(), "the router needs no plugin"
        server.stop()
    with serve(tmp_path, "--models-preset", preset, "--api-key", KEY, environment=stock_environment()) as server:
        page = call(server, "GET", "/moe?model=main&autoload=1")
        assert page.status_code == 200 and page.text.startswith("<!doctype html>")
        states = call(server, "GET", "/models", Authorization=f"Bearer {KEY}").json()["data"]
        assert all(model["status"]["value"] == "unloaded" for model in states), "without the key nothing is loaded"
        assert "moe_hot" not in Path(f"/proc/{server.child.pid}/maps").read_text(), "the router needs no plugin"
        server.stop()
    assert all(Profile.read(file).raw["layers"] for file in files.values())


def test_a_model_that_a_router_loads_again_leaves_the_first_recording(tmp_path):
    file, preset = tmp_path / "experts.json", tmp_path / "models.ini"
    preset.write_text(f"version = 1\n[main]\nmodel = {shipped_model()}\n")
    with serve(tmp_path, "--models-preset", preset, "--moe-layer-perf-out", file, environment=stock_environment()) as server:
        for _ in range(2):
            complete(server, 5, model="main")
            assert call(server, "POST", "/models/unload", {"model": "main"}).status_code == 200
            wait_for("the model is unloaded", lambda: model_state(server) == "unloaded")
        server.stop()
    (second,) = set(tmp_path.glob("experts*.json")) - {file}
    assert Profile.read(file).raw["summary"] == Profile.read(second).raw["summary"]


def model_state(server: Server) -> str:
    (model,) = call(server, "GET", "/models").json()["data"]
    return model["status"]["value"]


def test_a_models_own_profile_is_kept_by_server_and_router(tmp_path):
    """`--moe-hot-cache auto`. What is POSTed goes there too, and what is learnt later is added."""
    models = {name: tmp_path / name / "model.gguf" for name in ("main", "other")}
    for model, source in zip(models.values(), (shipped_model(), generated("Q4_K")), strict=True):
        model.parent.mkdir()
        model.symlink_to(source)
    kept = {name: model.with_name("model.gguf.experts.json") for name, model in models.items()}
    learning = fake_environment(MOE_HOT_TEST_FREE_COPIES=1)
    size = ["--moe-hot-cache", "auto", "--moe-hot-cache-max-mib", 4, "--moe-hot-cache-device", FAKE_DEVICE]
    with serve(tmp_path, "-m", models["main"], *size, environment=learning) as server:
        complete(server, 40)
        without_model = {"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[0, 1]]}]}
        answer = call(server, "POST", CACHE, {"profile": without_model, "save_to_disk": True})
        assert answer.status_code == 200 and answer.json()["saved_to"] == str(kept["main"]), answer.text
        assert json.loads(kept["main"].read_text())["model"]["tensors"], "whose it is stands there now"
        assert snapshot(server)["options"]["--moe-hot-cache"] == "auto"
        complete(server, 40)
        server.stop()
    assert len(json.loads(kept["main"].read_text())["layers"]) == N_LAYERS
    preset = tmp_path / "models.ini"
    preset.write_text("version = 1\n" + "".join(f"[{name}]\nmodel = {model}\n" for name, model in models.items()))
    with serve(tmp_path, "--models-preset", preset, *size, environment=learning) as server:
        for name in models:
            complete(server, 40, model=name)
        server.stop()
    assert all(json.loads(file.read_text())["layers"] for file in kept.values())


def test_a_routers_own_flags_are_its_childrens(tmp_path):
    file = tmp_path / "experts.json"
    preset = tmp_path / "models.ini"
    preset.write_text(f"version = 1\n[main]\nmodel = {shipped_model()}\n")
    arguments = ["--models-preset", preset, "--moe-layer-perf-out", file]
    with serve(tmp_path, *arguments, environment=stock_environment()) as server:
        complete(server, 5, model="main")
        server.stop()
    assert Profile.read(file).raw["layers"]


DRAFTS = {
    "-ngld": ["-ngld", 0],
    "--spec-draft-cpu-moe": ["--spec-draft-cpu-moe"],
    "--spec-draft-n-cpu-moe": ["--spec-draft-n-cpu-moe", 3],
    "--spec-draft-override-tensor": ["--spec-draft-override-tensor", "_exps=CPU"],
    "--spec-draft-device": ["--spec-draft-device", FAKE_DEVICE],
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_model_beside_a_cache(tmp_path, own_profile, name):
    draft = ["--model-draft", shipped_model(), "--spec-type", "draft-simple", *DRAFTS[name]]
    with serve_with_cache(tmp_path, own_profile) as server:
        text = complete(server, 40)["content"]
        server.stop()
    with serve_with_cache(tmp_path, own_profile, *draft) as server:
        answer = complete(server, 40)
        assert answer["content"] == text and answer["timings"]["moe_hot"]["hits"] > 0
        assert answer["timings"]["draft_n"] > 0
        server.stop()
