"""Who may do what on the cluster, as commands of Kafka's own tool. One principal a role: `User:headrace-<role>`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from schemas.topics import (
    ANSWERS,
    BATCH,
    CONTROL,
    DEAD_LETTERS,
    DOORS,
    INTERACTIVE,
    LIFECYCLE,
    REGISTRY,
    SCHEMAS,
    TENANTS,
    TOKENS,
    WORKERS,
    requests_topic,
    tenant_tokens_topic,
)

TOOL = "kafka-acls.sh"
ALL_REQUESTS, ALL_WORK, ALL_TENANT_TOKENS, ALL = "requests.*", "work.*", "tokens.*", "*"
ALL_LEDGERS, ALL_KEYS = "ledger.*", "idempotency.*"


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of process reads, writes and creates, and its consumer groups. A name that ends in `*` is a prefix."""

    name: str
    why: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    groups: tuple[str, ...] = ()
    creates: tuple[str, ...] = ()

    @property
    def principal(self) -> str:
        """Kafka's name for it."""
        return f"User:headrace-{self.name}"


ROLES = (
    Role(
        "bridge",
        "the front door",
        (TOKENS, ALL_TENANT_TOKENS, TENANTS, REGISTRY, WORKERS, SCHEMAS, LIFECYCLE, ANSWERS),
        (requests_topic(INTERACTIVE), requests_topic(BATCH), DOORS, SCHEMAS),
    ),
    Role(
        "admission",
        "judges requests",
        (ALL_REQUESTS, TENANTS, REGISTRY, WORKERS, DOORS, SCHEMAS, LIFECYCLE, ALL_LEDGERS, ALL_KEYS, ANSWERS),
        (
            ALL_REQUESTS,
            ALL_WORK,
            TOKENS,
            ALL_TENANT_TOKENS,
            LIFECYCLE,
            ALL_LEDGERS,
            ALL_KEYS,
            CONTROL,
            DEAD_LETTERS,
            SCHEMAS,
        ),
        ("admission.*", "cache"),
    ),
    Role(
        "endings",
        "folds token streams",
        (TOKENS, ALL_TENANT_TOKENS, SCHEMAS),
        (TOKENS, ALL_TENANT_TOKENS, LIFECYCLE, ANSWERS, DEAD_LETTERS, SCHEMAS),
        ("endings",),
    ),
    Role(
        "lifecycle",
        "keeps deadlines, and puts aside what can't be read",
        (
            LIFECYCLE,
            ANSWERS,
            CONTROL,
            DOORS,
            WORKERS,
            TENANTS,
            REGISTRY,
            SCHEMAS,
            ALL_LEDGERS,
            ALL_KEYS,
            DEAD_LETTERS,
        ),
        (TOKENS, ALL_TENANT_TOKENS, CONTROL, DEAD_LETTERS, SCHEMAS),
        ("deadlines", "dead-letters"),
    ),
    Role(
        "worker",
        "serves models",
        (ALL_WORK, TOKENS, ALL_TENANT_TOKENS, CONTROL, TENANTS, REGISTRY, SCHEMAS),
        (TOKENS, ALL_TENANT_TOKENS, WORKERS, DEAD_LETTERS, SCHEMAS),
        ("work.*",),
        creates=(ALL_WORK,),
    ),
    Role(
        "operator",
        "the command line",
        (ALL,),
        (TENANTS, REGISTRY, SCHEMAS, DEAD_LETTERS, ALL_REQUESTS),
        creates=(ALL,),
    ),
)


def tenant_role(tenant: str) -> Role:
    """A direct producer of one tenant: writes requests, reads its own answers and nobody else's."""
    topic = tenant_tokens_topic(tenant)
    writes = (requests_topic(INTERACTIVE), requests_topic(BATCH))
    return Role(f"tenant-{tenant}", "a direct producer", (topic,), writes, (f"{tenant}.*",))


def commands(bootstrap: str, tenants: Iterable[str] = (), command_config: str | None = None) -> Iterator[str]:
    """The lines of a shell script. What may not be written isn't listed: the cluster must deny by default.

    `command_config` is the tool's properties file, which says how an administrator signs in.
    """
    yield "# The broker must deny what no rule allows: allow.everyone.if.no.acl.found=false"
    for role in roles(tenants):
        yield f"# {role.name}: {role.why}"
        yield from role_commands(role, bootstrap, command_config)


def roles(tenants: Iterable[str] = ()) -> Iterator[Role]:
    """Every role: those of Headrace's own processes, then each tenant's direct producer."""
    yield from ROLES
    yield from map(tenant_role, tenants)


def role_commands(role: Role, bootstrap: str, command_config: str | None = None) -> Iterator[str]:
    """The commands that let one role do what it needs."""
    sign_in = f" --command-config {shlex.quote(command_config)}" if command_config else ""
    start = f"{TOOL} --bootstrap-server {bootstrap}{sign_in} --add --allow-principal {role.principal}"
    for topic in role.reads:
        yield f"{start} --operation Read --operation Describe {_resource('topic', topic)}"
    for topic in role.writes:
        yield f"{start} --operation Write --operation Describe {_resource('topic', topic)}"
    for group in role.groups:
        yield f"{start} --operation Read {_resource('group', group)}"
    if role.writes:
        yield f"{start} --operation IdempotentWrite --cluster"
    for topic in role.creates:
        changes = "--operation Create --operation Alter --operation AlterConfigs --operation DescribeConfigs"
        yield f"{start} {changes} {_resource('topic', topic)}"


def _resource(kind: str, name: str) -> str:
    if name == ALL:
        return f"--{kind} '*'"
    if name.endswith("*"):
        return f"--{kind} {name.removesuffix('*')} --resource-pattern-type prefixed"
    return f"--{kind} {name}"
