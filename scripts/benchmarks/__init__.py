"""What scripts/bench can measure, one module each, and what they share: `programs` runs llama.cpp's programs, `pairs`
turns runs into ratios with intervals, `hot` runs the hot lane on FakeDevice."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/generate")]
