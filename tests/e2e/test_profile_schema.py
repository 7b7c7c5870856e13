"""profiles/experts.schema.json agrees with what is written and with what is refused."""

import json

import jsonschema
import pytest

from experts_json import Profile
from models import generated
from paths import REPOSITORY
from probe import decode

CORPUS = REPOSITORY / "tests/hostile"
EXPECTED = json.loads((CORPUS / "expected.json").read_text())
SCHEMA = json.loads((REPOSITORY / "profiles/experts.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_itself_is_one():
    VALIDATOR.check_schema(SCHEMA)


def test_a_recorded_profile_obeys_the_schema(probe, tmp_path):
    path = tmp_path / "experts.json"
    probe.recording(generated("Q4_K"), [decode(5)], path)
    VALIDATOR.validate(Profile.read(path).raw)


@pytest.mark.parametrize("name", [name for name, case in EXPECTED.items() if case["against_schema"] is not None])
def test_the_schema_refuses_what_it_can_see(name):
    """`against_schema` is null where a file is no JSON, and false where the fault is beyond JSON Schema."""
    profile = json.loads((CORPUS / name).read_text())
    assert VALIDATOR.is_valid(profile) != EXPECTED[name]["against_schema"]
