"""The time that there is, and what was done with it: every part gets a result or the reason why it has none."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Kept for the table and the files at the end.
RESERVE_S = 5


class Skipped(Exception):
    """A part, or something in it, was not done; the words say why."""


class Budget:
    """So many seconds from `start`, of time.monotonic."""

    def __init__(self, seconds: float, start: float):
        self.start = start
        self.end = self.start + seconds - RESERVE_S
        self.part_end = self.end

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.start

    @property
    def left_s(self) -> float:
        """Of the part that is under way."""
        return min(self.part_end, self.end) - time.monotonic()

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """A part that may use this share of what is left of the whole."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise Skipped("no time left")
        self.part_end = time.monotonic() + share * left
        try:
            yield
        finally:
            self.part_end = self.end

    def require(self, seconds: float, what: str) -> None:
        if seconds > self.left_s:
            raise Skipped(f"{what} takes about {seconds:.0f} s; {max(self.left_s, 0):.0f} s were left for it")

    def repeat(self, round_: Callable[[], None], least: int, most: int) -> int:
        """Calls `round_` while the next call is expected to end in time, `most` times at the most; returns how often it did. The
        first call tells how long one takes; if not even `least` fit, it raises."""
        begin = time.monotonic()
        round_()
        each = time.monotonic() - begin
        if least > 1:
            self.require(each * (least - 1), f"{least - 1} more rounds")
        done = 1
        while done < most and each <= self.left_s:
            begin = time.monotonic()
            round_()
            each = max(each, time.monotonic() - begin)
            done += 1
        return done
