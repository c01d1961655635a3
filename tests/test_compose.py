"""docker-compose.yml can't be started in these tests; its form is checked, and every command in it is one that exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cli.main import cli
from infra import models_file, settings
from infra.settings import ProcessSettings
from schemas.topics import BATCH, INTERACTIVE

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if str(service["image"]).startswith("headrace:")}
THEIRS = {name: service for name, service in SERVICES.items() if name not in OURS}
VERSION_NUMBERS = {"postgres": 2, "clickhouse/clickhouse-server": 4}
"""Of how many numbers an exact version consists, where it isn't three."""
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def parse(argv: list[str]) -> list[str]:
    """The names of the command that argv leads to; fails as the command line itself would. Runs nothing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="headrace")
    path: list[str] = []
    while True:
        child = command.make_context(command.name or "headrace", list(argv), parent=context, resilient_parsing=False)
        if not isinstance(command, click.Group):
            return path
        name, command_found, argv = command.resolve_command(child, [*child._protected_args, *child.args])
        assert name is not None
        assert command_found is not None
        path.append(name)
        command, context = command_found, child


def test_it_holds_the_services_and_all_our_processes() -> None:
    images = {service["image"].split(":")[0] for service in THEIRS.values()}
    assert {"apache/kafka", "redis", "postgres", "clickhouse/clickhouse-server"} <= images
    assert "s3" in THEIRS
    assert {
        "topics",
        "models",
        "admission-interactive",
        "admission-batch",
        "endings",
        "lifecycle",
        "worker",
        "bridge",
    } <= set(OURS)


@pytest.mark.parametrize("name", THEIRS)
def test_each_image_is_an_exact_version(name: str) -> None:
    """A tag such as `8-alpine` is another image next month."""
    image, _, tag = THEIRS[name]["image"].partition(":")
    assert re.fullmatch(r"v?\d+(\.\d+)*(-alpine)?", tag)
    assert len(re.findall(r"\d+", tag)) == VERSION_NUMBERS.get(image, 3)


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_that_exists(name: str) -> None:
    argv = OURS[name]["command"]
    if argv == ["--help"]:
        return
    assert parse(argv)


def test_an_unknown_command_or_option_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["streams", "admision"])
    with pytest.raises(click.UsageError):
        parse(["bridge", "--prot", "8000"])
    with pytest.raises(click.UsageError):
        parse(["worker", "smollm2"])


def test_each_admission_keeps_answers_in_the_redis_that_is_there() -> None:
    found = [service for service in OURS.values() if "--tier" in service["command"]]
    urls = {service["environment"]["HEADRACE_ADMISSION_CACHE_URL"] for service in found}
    assert urls == {"redis://redis:6379/0"}
    assert "--save" in SERVICES["redis"]["command"]
    assert all(served.cache.ttl_s > 0 for served in models_file.load(ROOT / "infra/deploy/models.yaml"))


def test_each_tier_has_its_admission() -> None:
    tiers = {argv[argv.index("--tier") + 1] for service in OURS.values() if "--tier" in (argv := service["command"])}
    assert tiers == {INTERACTIVE, BATCH}


@pytest.mark.parametrize("name", SERVICES)
def test_what_it_depends_on_exists_and_can_meet_the_condition(name: str) -> None:
    for target, how in SERVICES[name].get("depends_on", {}).items():
        assert target in SERVICES
        assert how["condition"] in CONDITIONS
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[target]
        if how["condition"] == "service_completed_successfully":
            assert "restart" not in SERVICES[target], "a job that restarts never completes"


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_this_machine_alone_and_once(name: str) -> None:
    published = [port.rsplit(":", 1)[0] for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == len(set(published))
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_the_bridge_listens_where_its_port_is_published() -> None:
    command = SERVICES["bridge"]["command"]
    inside = command[command.index("--port") + 1]
    grpc = command[command.index("--grpc-port") + 1]
    assert SERVICES["bridge"]["ports"] == [f"127.0.0.1:8000:{inside}", f"127.0.0.1:8001:{grpc}"]
    assert command[command.index("--host") + 1] == "0.0.0.0"


def names_read() -> set[str]:
    """Every HEADRACE_ variable that the code reads."""
    names = {"HEADRACE_DATA", "HEADRACE_OPS_PORT"}
    for cls in vars(settings).values():
        if isinstance(cls, type) and issubclass(cls, ProcessSettings):
            prefix = f"HEADRACE_{cls.__name__.removesuffix('Settings').upper()}_"
            names |= {prefix + field.name.upper() for field in dataclasses.fields(cls)}
    for room in ("infra", "streams", "workers", "bridge", "cli"):
        for path in (ROOT / room).rglob("*.py"):
            names |= set(re.findall(r"[\"'](HEADRACE_[A-Z_]+)[\"']", path.read_text()))
    return names


@pytest.mark.parametrize("name", OURS)
def test_each_variable_is_one_that_we_read(name: str) -> None:
    ours = {key for key in OURS[name]["environment"] if key.startswith("HEADRACE_")}
    assert ours
    assert ours <= names_read()


@pytest.mark.parametrize("name", OURS)
def test_the_settings_that_the_variables_give_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {key: default_of(str(value)) for key, value in OURS[name]["environment"].items()}
    for cls in (settings.AdmissionSettings, settings.EndingsSettings, settings.WorkerSettings, settings.BridgeSettings):
        found = cls.from_env(environment)
        assert found.kafka.bootstrap == "kafka:9092"
        assert found.data_dir == Path("/data")
        assert found.ops_port == 9464


def default_of(value: str) -> str:
    """What Compose puts in for `${NAME:-default}` when NAME isn't set."""
    return re.sub(r"\$\{[A-Z0-9_]+:-([^}]*)\}", r"\1", value)


def test_kafka_is_reached_at_the_address_it_advertises() -> None:
    environment = SERVICES["kafka"]["environment"]
    advertised = dict(address.split("://") for address in environment["KAFKA_ADVERTISED_LISTENERS"].split(","))
    assert advertised["PLAINTEXT"] == SERVICES["bridge"]["environment"]["HEADRACE_KAFKA"]
    listeners = {address.split("://")[0] for address in environment["KAFKA_LISTENERS"].split(",")}
    assert listeners == {pair.split(":")[0] for pair in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")}
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_are_declared_and_mounted_files_exist(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).is_file()
        else:
            assert source in COMPOSE["volumes"]


def test_each_model_of_the_mounted_file_has_a_worker() -> None:
    entries = models_file.load(ROOT / "infra/deploy/models.yaml")
    served = [tuple(service["command"][1:]) for service in OURS.values() if service["command"][0] == "worker"]
    assert sorted(served) == sorted((entry.name, entry.version) for entry in entries)


def test_the_image_has_what_each_engine_of_the_mounted_file_needs() -> None:
    text = (ROOT / "infra/deploy/Dockerfile").read_text()
    engines = {entry.engine for entry in models_file.load(ROOT / "infra/deploy/models.yaml")}
    assert engines == {"vllm", "onnx"}
    assert 'extras="onnx,stores${ENGINE:+,$ENGINE}"' in text
    assert COMPOSE["x-image"]["build"]["args"]["ENGINE"] == "${ENGINE:-cpu}"


def test_the_image_is_built_from_a_file_that_exists_with_what_it_copies() -> None:
    for service in OURS.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    text = (ROOT / "infra/deploy/Dockerfile").read_text()
    for name in re.findall(r"constraints[a-z-]*\.txt", text):
        assert (ROOT / name).is_file()
    assert 'ENTRYPOINT ["headrace"]' in text
