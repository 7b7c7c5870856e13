"""The real llama-server through the launcher: it answers as stock, and its profile is whole and right afterwards.

A layer sees every token of a batch below 32 tokens; the last layer only the rows whose output is wanted: one of a
prompt, and every decoded token. Of a prompt of 32 tokens and more only that one row is seen.
"""

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest

from experts_json import Profile
from processes import wait_for
from server import N_SEQUENCES, START_UP, Answer, recording_server, stock_server

SHORT = "Once upon a"
LONG = "The expert tensors of a layer stay where they are; what moves is the routing. " * 4
CANCELLED_TOKENS = 1500


@pytest.fixture
def out_file(tmp_path):
    return tmp_path / "experts.json"


def expected_rows(profile: Profile, answers: list[Answer]) -> dict[int, int]:
    last = profile.layers[-1]
    answers = [START_UP, *answers]
    rows = sum((a.n_prompt if a.n_prompt < 32 else 0) + a.n_decoded for a in answers)
    return dict.fromkeys(profile.layers, rows) | {last: sum(1 + a.n_decoded for a in answers)}


def n_layer(model) -> int:
    return int(gguf.GGUFReader(model).get_field("qwen3moe.block_count").contents())


def assert_profile_of(model, out_file, answers: list[Answer]) -> None:
    profile = Profile.read(out_file)
    assert profile.layers == list(range(n_layer(model)))
    assert profile.layer_calls > 0
    assert profile.n_rows == expected_rows(profile, answers)
    assert [path.name for path in out_file.parent.glob("*.json*")] == [out_file.name], "a temporary file is left"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_streaming_chat_and_a_clean_end(model_of_two, tmp_path, out_file, signal_number):
    with recording_server(model_of_two, tmp_path, out_file) as server:
        answers = [server.chat(SHORT, 12), server.chat(LONG, 9)]
        server.stop(signal_number)
    assert [answer.n_predicted for answer in answers] == [12, 9]
    assert all(answer.text for answer in answers)
    assert_profile_of(model_of_two, out_file, answers)


def test_the_text_is_stocks(model_of_two, tmp_path, out_file):
    def ask(server) -> list[Answer]:
        answers = [server.complete(prompt, n) for prompt, n in ((SHORT, 48), (LONG, 32), ("x", 8), (LONG + SHORT, 24))]
        return [*answers, server.chat(SHORT, 40), server.chat(LONG, 16)]

    with stock_server(model_of_two, tmp_path) as server:
        stock = ask(server)
    with recording_server(model_of_two, tmp_path, out_file) as server:
        ours = ask(server)
        server.stop()
    assert ours == stock
    assert_profile_of(model_of_two, out_file, ours)


def test_four_clients_at_once(model_of_two, tmp_path, out_file):
    """Prompts of at most 7 tokens: no batch of four sequences reaches 32, so every token is seen."""
    prompts = [[10 + i, 20 + i, 30 + i, 40 + i] for i in range(3 * N_SEQUENCES)]
    with recording_server(model_of_two, tmp_path, out_file) as server:
        with ThreadPoolExecutor(N_SEQUENCES) as clients:
            answers = list(clients.map(lambda prompt: server.complete(prompt, 40), prompts))
        server.stop()
    assert len(answers) == len(prompts)
    assert_profile_of(model_of_two, out_file, answers)
    batches = Profile.read(out_file).by_batch_size[0]
    assert batches["batch_2_up"]["calls"] > len(prompts), "sequences were never decoded together"


def test_a_cancelled_request_leaves_a_server_that_answers(model_of_two, tmp_path, out_file):
    with recording_server(model_of_two, tmp_path, out_file) as server:
        with contextlib.closing(server.chat_events(SHORT, CANCELLED_TOKENS)) as events:
            for _ in range(3):
                next(events)
        wait_for("the cancelled sequence is free", lambda: server.busy_sequences() == 0)
        after = server.complete(SHORT, 10)
        server.stop()
    assert after.n_predicted == 10
    profile = Profile.read(out_file)
    cancelled_early = Answer("", after.n_prompt, 2)  # three events: the role, two tokens; both had the same prompt
    never_cancelled = Answer("", after.n_prompt, CANCELLED_TOKENS)
    least, most = (expected_rows(profile, [after, cancelled]) for cancelled in (cancelled_early, never_cancelled))
    for layer, rows in profile.n_rows.items():
        assert least[layer] <= rows < most[layer], f"layer {layer}"
