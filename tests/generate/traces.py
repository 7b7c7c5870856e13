"""Writes tests/traces/synthetic.route.csv: routing with habits, from a fixed seed. No model is behind it.

    python tests/generate/traces.py
"""

import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "traces/synthetic.route.csv"
N_LAYERS, N_EXPERT, N_USED, N_PROMPT, N_DECODE = 3, 16, 3, 8, 60
# How likely an expert stays from one token to the next.
STAYS = 0.5


def next_token(chooser: random.Random, before: list[int]) -> list[int]:
    kept = [expert for expert in before if chooser.random() < STAYS]
    while len(kept) < N_USED:
        expert = int(chooser.random() ** 2 * N_EXPERT)
        if expert not in kept:
            kept.append(expert)
    return kept


def main() -> None:
    chooser = random.Random(7)
    used: list[list[int]] = [[] for _ in range(N_LAYERS)]
    with OUT.open("w") as out:
        print(f"# route_trace v1\n# model=synthetic n_layer={N_LAYERS} n_expert={N_EXPERT}", file=out)
        for layer in range(N_LAYERS):
            print(f"# layer={layer} expert_bytes={1000 * (layer + 1)}", file=out)
        print("turn,phase,step,layer,slot,expert", file=out)
        for step in range(N_PROMPT + N_DECODE):
            for layer in range(N_LAYERS):
                used[layer] = next_token(chooser, used[layer])
                for slot, expert in enumerate(used[layer]):
                    print(f"0,{int(step >= N_PROMPT)},{step},{layer},{slot},{expert}", file=out)


if __name__ == "__main__":
    main()
