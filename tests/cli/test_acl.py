from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cli.acl import ROLES, commands
from cli.main import cli
from schemas.errors import HeadraceError
from streams.dead_letters import GROUP, TOPICS


def test_a_direct_producer_reads_its_own_topic_and_nobody_elses() -> None:
    own = [line for line in commands("b:1", ["acme"]) if "User:headrace-tenant-acme" in line]
    assert any("--operation Read --operation Describe --topic tokens.acme" in line for line in own)
    assert not any("prefixed" in line and "--topic" in line for line in own)
    written = [line for line in own if "--operation Write" in line and "--topic" in line]
    assert [line.rpartition("--topic ")[2] for line in written] == ["requests.interactive", "requests.batch"]


def test_only_endings_write_answers_and_only_the_operator_tenants() -> None:
    writers = {role.name for role in ROLES if "answers" in role.writes}
    assert writers == {"endings"}
    assert {role.name for role in ROLES if "tenants" in role.writes} == {"operator"}


def test_ledgers_are_admissions_alone_and_it_reads_what_they_are_folded_from() -> None:
    for kept in ("ledger.*", "idempotency.*"):
        assert {role.name for role in ROLES if kept in role.writes} == {"admission"}
    own, prefixed = (
        [line for line in commands("b:1") if "User:headrace-admission" in line],
        "--resource-pattern-type prefixed",
    )
    for topic in (f"--topic ledger. {prefixed}", f"--topic idempotency. {prefixed}", "--topic lifecycle"):
        for operation in ("Read", "Write"):
            assert any(line.endswith(f"--operation {operation} --operation Describe {topic}") for line in own)
    (operator,) = [role for role in ROLES if role.name == "operator"]
    assert operator.reads == ("*",)


def test_admission_fills_its_cache_from_answers_and_writes_none() -> None:
    own = [line for line in commands("b:1") if "User:headrace-admission" in line]
    assert any(line.endswith("--operation Read --operation Describe --topic answers") for line in own)
    assert any(line.endswith("--operation Read --group cache") for line in own)


def test_every_command_names_the_cluster_and_one_principal() -> None:
    for line in commands("b:1", ["acme"]):
        if not line.startswith("#"):
            assert line.startswith("kafka-acls.sh --bootstrap-server b:1 --add --allow-principal User:headrace-")


def test_json_has_the_same_commands_by_role() -> None:
    asked = ["topics", "acl", "--bootstrap", "b:1", "--tenant", "acme"]
    rows = [json.loads(line) for line in CliRunner().invoke(cli, [*asked, "--json"]).stdout.splitlines()]
    assert [row["role"] for row in rows] == [*(role.name for role in ROLES), "tenant-acme"]
    assert rows[-1]["principal"] == "User:headrace-tenant-acme"
    plain = [line for line in CliRunner().invoke(cli, asked).stdout.splitlines() if not line.startswith("#")]
    assert [line for row in rows for line in row["commands"]] == plain


def test_a_secured_cluster_is_signed_in_to() -> None:
    lines = [line for line in commands("b:1", [], "my admin.properties") if not line.startswith("#")]
    assert all(" --bootstrap-server b:1 --command-config 'my admin.properties' --add " in line for line in lines)


def test_a_tenant_that_can_be_no_topic_is_refused() -> None:
    with pytest.raises(HeadraceError):
        list(commands("b:1", ["a b"]))


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_name_that_no_tenant_can_have_prints_an_error_alone(more: list[str]) -> None:
    result = CliRunner().invoke(cli, ["topics", "acl", "--bootstrap", "b:1", "--tenant", "../x", *more])
    assert isinstance(result.exception, HeadraceError)
    assert result.stdout == ""


def test_the_front_door_writes_to_the_topic_of_each_tier() -> None:
    own = [line for line in commands("b:1") if "User:headrace-bridge" in line]
    for tier in ("interactive", "batch"):
        assert any(line.endswith(f"--operation Write --operation Describe --topic requests.{tier}") for line in own)


def test_lifecycle_reads_all_that_it_puts_records_of_aside() -> None:
    (role,) = [role for role in ROLES if role.name == "lifecycle"]
    assert GROUP in role.groups
    assert "dead-letters" in role.writes
    for topic in TOPICS:
        assert any(topic == name or (name.endswith("*") and topic.startswith(name[:-1])) for name in role.reads), topic


def test_front_doors_alone_tell_that_they_are_there_and_admission_reads_it() -> None:
    assert {role.name for role in ROLES if "doors" in role.writes} == {"bridge"}
    assert {role.name for role in ROLES if "doors" in role.reads} == {"admission", "lifecycle"}


def test_the_front_door_reads_which_workers_are_ready_and_workers_alone_tell() -> None:
    own = [line for line in commands("b:1") if "User:headrace-bridge" in line]
    assert any(line.endswith("--operation Read --operation Describe --topic workers") for line in own)
    assert {role.name for role in ROLES if "workers" in role.writes} == {"worker"}
