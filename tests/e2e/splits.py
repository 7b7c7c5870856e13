"""Reads how the scheduler cut graphs into splits, from the debug output of GGML_SCHED_DEBUG=2 in a log."""

import re
from dataclasses import dataclass, field

DEBUG_ENVIRONMENT = {"GGML_SCHED_DEBUG": "2"}  # 2: with every node; views are left out

SPLIT = re.compile(r"^## SPLIT #(\d+): (\S+) # \d+ inputs")
NODE = re.compile(r"^node #\s*\d+ \(\s*(\S+?)\): \s*(\S*) \(")  # names are cut after 20 characters


@dataclass(frozen=True)
class Node:
    op: str
    name: str


@dataclass
class Split:
    backend: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def ops(self) -> list[str]:
        return [node.op for node in self.nodes]


def graphs(log: str) -> list[list[Split]]:
    """Every graph that was cut, measuring passes included, in the order of the log."""
    found: list[list[Split]] = []
    for line in log.splitlines():
        if match := SPLIT.match(line):
            if match[1] == "0":
                found.append([])
            found[-1].append(Split(match[2]))
        elif match := NODE.match(line):
            found[-1][-1].nodes.append(Node(match[1], match[2]))
    return found


def of_backend(graph: list[Split], backend: str) -> list[Split]:
    return [split for split in graph if split.backend == backend]


def backends_of(graph: list[Split], name: str) -> set[str]:
    """Which backends compute the nodes with names that begin like this."""
    return {split.backend for split in graph for node in split.nodes if node.name.startswith(name)}
