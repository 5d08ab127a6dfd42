from __future__ import annotations

from pathlib import Path

import pytest

from daemon.errors import ConfigError, Problem
from daemon.policy.rules import Architectures, architectures
from daemon.policy.schemes import parse_scheme
from daemon.policy.store import HEAD_DIMS, load_allowlist, load_policies
from daemon.resources import shipped

MINE = """\
description: Mine.
source: Measured by me.
mode: turbo8v4
bits_per_value: {64: 6.25, 128: 6.125, 256: 6.0625}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policies = tmp_path / "policies"
    policies.mkdir()
    return policies


def problems(folder: Path) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_policies(folder)
    return list(caught.value.problems)


def test_the_shipped_policies_are_the_documented_ones() -> None:
    found = {
        name: parse_scheme(policy.mode).name for name, policy in load_policies().policies.items()
    }
    assert found == {
        "exact": "fp16",
        "quality": "int8",
        "balanced": "turbo8v4",
        "compact": "turbo4v4",
        "small": "turbo4v3",
        "extreme": "turbo3v3",
    }


def test_stated_bits_per_value_are_those_of_the_scheme() -> None:
    for policy in load_policies().policies.values():
        scheme = parse_scheme(policy.mode)
        for head_dim in HEAD_DIMS:
            assert policy.bits_per_value[head_dim] == scheme.bits_per_value(head_dim, head_dim)


def test_a_missing_user_folder_is_no_error(tmp_path: Path) -> None:
    assert load_policies(tmp_path / "policies").policies == load_policies().policies


def test_the_shipped_folder_itself_is_no_user_folder() -> None:
    """In a checkout, policies/ beside servers.yaml is the shipped folder with its rule files."""
    assert load_policies(shipped("policies")) == load_policies()


def test_a_user_policy_is_found_beside_the_shipped_ones(folder: Path) -> None:
    (folder / "mine.yaml").write_text(MINE)
    found = load_policies(folder)
    assert found.policies["mine"].description == "Mine."
    assert found.files["mine"] == folder / "mine.yaml"
    assert "balanced" in found.policies
    assert found.warnings == ()


def test_a_user_policy_with_a_shipped_name_wins_with_a_warning(folder: Path) -> None:
    (folder / "balanced.yaml").write_text(MINE)
    found = load_policies(folder)
    assert found.policies["balanced"].description == "Mine."
    (warning,) = found.warnings
    assert str(folder / "balanced.yaml") in warning
    assert str(shipped("policies") / "balanced.yaml") in warning


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "said"),
    [
        ("mode: turbo8v4", "mode: q8_0", 3, "mode", "nearest scheme is int8"),
        ("mode: turbo8v4", "mode: off", 3, "mode", "valid string"),
        ("64: 6.25", "64: 6", 4, "bits_per_value", "write {64: 6.25, 128: 6.125, 256: 6.0625}"),
        ("mode:", "tail_tokens: 40\nmode:", 3, "tail_tokens", "write 32 or 64"),
        ("mode:", "boundry_v: 2\nmode:", 3, "boundry_v", 'did you mean "boundary_v"?'),
        ("mode:", "boundary_v: -1\nmode:", 3, "boundary_v", "greater than or equal to 0"),
        ("mode:", "mode: fp16\nmode:", 4, "", 'the key "mode" stands twice'),
        ("mode:", "layers:\n- match: all\n  mode: bogus\nmode:", 5, "layers.0.mode", "one of"),
        ("description: Mine.\n", "", 1, "description", "required"),
        ("mode: turbo8v4", "mode: ]", 3, "", "expected"),
        ("mode: turbo8v4", "mode: \x01", 0, "", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    old: str, new: str, line: int, path: str, said: str, folder: Path
) -> None:
    (folder / "mine.yaml").write_text(MINE.replace(old, new))
    (problem,) = problems(folder)
    assert (problem.file, problem.line, problem.path) == (str(folder / "mine.yaml"), line, path)
    assert said in str(problem)


@pytest.mark.parametrize("name", ["Mine.yaml", "allowlist.yaml", "architectures.yml"])
def test_a_name_that_no_policy_may_have_is_refused(name: str, folder: Path) -> None:
    (folder / name).write_text(MINE)
    (problem,) = problems(folder)
    assert problem.hint


def test_every_problem_of_every_file_is_reported(folder: Path) -> None:
    (folder / "a.yaml").write_text("mode: 4\nmood: 5\n")
    (folder / "b.yaml").write_bytes(b"\xff")
    files = [Path(problem.file).name for problem in problems(folder)]
    assert files.count("a.yaml") > 2
    assert files.count("b.yaml") == 1


def test_local_entries_are_added_to_the_shipped_allowlist(tmp_path: Path) -> None:
    local = tmp_path / "allowlist.yaml"
    assert load_allowlist(local) == load_allowlist()
    local.write_text("entries: [{fingerprint: abc, evidence: measured here}]\n")
    *shipped_entries, mine = load_allowlist(local)
    assert tuple(shipped_entries) == load_allowlist()
    assert mine.fingerprint == "abc"


@pytest.mark.parametrize(
    "entry", ["{evidence: x}", "{model_type: a, fingerprint: b, evidence: x}", "{model_type: a}"]
)
def test_an_allowlist_entry_names_one_subject_and_its_evidence(entry: str, tmp_path: Path) -> None:
    local = tmp_path / "allowlist.yaml"
    local.write_text(f"entries:\n- {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_allowlist(local)
    assert [problem.line for problem in caught.value.problems] == [2]


def test_every_family_that_is_named_exists() -> None:
    content = architectures().model_dump()
    content["aliases"] = {"mistral": "lama"}
    with pytest.raises(ValueError, match="no such family: lama"):
        Architectures.model_validate(content)
