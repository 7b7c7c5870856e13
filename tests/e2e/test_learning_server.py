"""The cache of a server learns the text. Prompts go token by token, so that every token of a text counts, and the budget
holds about a quarter of the experts.

Hits of a stretch of text are the difference of what `--moe-layer-perf-out`'s file counts before and after it; the file
is saved every 5 s, and waited for until its calls reach what was sent."""

import shutil
from pathlib import Path
from statistics import median

import pytest

import paths
from conftest import shipped_model
from experts_json import Profile
from fake import fake_environment
from hot import complaints, starts
from learning import MAX_MIB, UPDATE_RATE
from probe import decode, greedy
from processes import stock_environment, wait_for
from server import START_UP, Server, start
from test_hot_perplexity import read

N_EXPERT = 32
SLOTS = N_EXPERT // 4
KINDS = ("prose", "code", "manual")
TOKEN_BY_TOKEN = ["-ub", 1, "-t", 1, "-c", 2048, "-np", 1, "--no-repack", "--no-warmup", "--cpu-moe", "-ngl", 0]
NEUTRAL = list(range(300, 308))  # tokens
RECOVERED = 0.95
pytestmark = pytest.mark.full
Part = tuple[str, int, int]  # tokens of a kind of text, from here to there


class Servers:
    """Starts servers that read, and stops them."""

    def __init__(self, hot, folder: Path):
        self.hot, self.folder, self.n_runs = hot, folder, 0
        self.tokens: dict[str, list[int]] = {}
        self.profile = folder / "mix.json"
        self.read([(kind, 1500, 2500) for kind in KINDS], self.profile)
        steps = [decode(1), greedy(6)]
        self.budget = hot.run(shipped_model(), steps, self.profile, SLOTS).start.mib

    def read(self, parts: list[Part], out_file: Path, measured: int | None = None, **cache) -> tuple[int, int]:
        """A server reads all parts, one prompt each, and ends. Hits and requests of those from number `measured` on."""
        self.n_runs += 1
        own = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": str(out_file)}
        if cache:
            environment = fake_environment(plugin=paths.PLUGIN, **own, **cache)
        else:
            environment = stock_environment(GGML_BACKEND_PATH=str(paths.PLUGIN), **own)
        command = [paths.STOCK_BIN / "llama-server", "-m", shipped_model(), *TOKEN_BY_TOKEN]
        before, n_sent = (0, 0), START_UP.n_prompt
        with start(command, self.folder, f"server-{self.n_runs}", environment) as server:
            if cache:
                n_sent += wait_until_filled(server)
            for index, (kind, begin, end) in enumerate(parts):
                if index == measured:
                    wait_for("counts are saved", lambda: out_file.exists() and n_calls(out_file) >= n_sent)
                    before = totals(out_file)
                if kind not in self.tokens:
                    self.tokens[kind] = server._post("/tokenize", {"content": read_text(kind)}).json()["tokens"]
                prompt = self.tokens[kind][begin:end]
                assert server.complete(prompt, 1).n_prompt == len(prompt) == end - begin
                n_sent += len(prompt)
            server.stop()
        assert n_calls(out_file) == n_sent
        self.log = server.log.read_text()
        return tuple(after - before for after, before in zip(totals(out_file), before))

    def hit_rate(self, before: list[Part], measured: list[Part], rate: str | int = "", profile: Path | None = None) -> float:
        """Over what is measured, after what is before; with a copy of the profile, or this very one."""
        profile = profile or Path(shutil.copy(self.profile, self.folder / f"profile-{self.n_runs}.json"))
        out_file = self.folder / f"hits-{self.n_runs}.json"
        cache = {"LLAMA_ARG_MOE_HOT_CACHE": profile, MAX_MIB: self.budget, UPDATE_RATE: rate}
        hits, requests = self.read([*before, *measured], out_file, len(before), **cache)
        assert complaints(self.log) == []
        (begin,) = starts(self.log)
        assert SLOTS - 1 <= begin.slots <= SLOTS + 2
        assert hits > 0
        return hits / requests


def totals(profile: Path) -> tuple[int, int]:
    """Hits and requests."""
    measured = Profile.read(profile, cached=True)
    return measured.hits, sum(measured.n_requests.values())


def n_calls(profile: Path) -> int:
    return Profile.read(profile, cached=True).raw["updates"]


def wait_until_filled(server: Server) -> int:
    """The cache's line stands in the log; its experts, less than 3 MiB, follow while some tokens are read: so many."""
    server.complete(NEUTRAL, 1)
    wait_for("the cache is allocated", lambda: starts(server.log.read_text()))
    answers = [server.complete(NEUTRAL, 1) for _ in range(4)]
    return (1 + len(answers)) * len(NEUTRAL)


def read_text(kind: str) -> str:
    return read(paths.REPOSITORY / f"tests/models/text/{kind}.txt")


@pytest.fixture(scope="module")
def servers(hot, tmp_path_factory) -> Servers:
    return Servers(hot, tmp_path_factory.mktemp("servers"))


@pytest.mark.parametrize("kind", KINDS)
def test_after_200_tokens_of_a_kind_it_is_ahead_of_the_fixed_set(servers, kind):
    """The fixed set is the best for all kinds together; it has one more resident, where the other keeps a slot spare."""
    warm_up, measured = [(kind, 0, 200)], [(kind, 200, 600)]
    fixed, learning = (servers.hit_rate(warm_up, measured, rate) for rate in (0, ""))
    print(f"{kind}: fixed {fixed:.3f}, learning {learning:.3f}")
    assert learning > fixed


@pytest.mark.parametrize(("old", "new"), [("prose", "code"), ("code", "prose"), ("manual", "code")])
def test_a_switch_of_kind_is_made_up_for_within_100_tokens(servers, old, new):
    """Medians of three: when a copy lands differs from run to run."""
    measured, first = [(new, 100, 400)], [(new, 0, 100)]
    switched = median(servers.hit_rate([(old, 0, 600), *first], measured) for _ in range(3))
    never = median(servers.hit_rate(first, measured) for _ in range(3))
    print(f"{old} to {new}: {switched:.3f}, only {new}: {never:.3f}")
    assert switched >= RECOVERED * never


def test_the_second_start_begins_better_than_the_first(servers, tmp_path):
    """Over the same 100 tokens."""
    profile, first_tokens = Path(shutil.copy(servers.profile, tmp_path / "experts.json")), [("prose", 800, 900)]
    first = servers.hit_rate([], first_tokens)
    servers.hit_rate([], [("prose", 0, 800)], profile=profile)
    second = servers.hit_rate([], first_tokens, profile=profile)
    print(f"first start {first:.3f}, second start {second:.3f}")
    assert second > first
