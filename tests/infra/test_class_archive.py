"""A start with the archive of classes is an ordinary start, only cheaper; whatever is wrong with the archive, the broker starts."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from infra.broker import EmbeddedKafka, class_path, jars_folder
from infra.class_archive import ClassArchive

MADE_WITHIN_S = 180.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder with the list of the jars that are there, and no archive."""
    class_path(jars_folder())
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "jars.json").write_text((jars_folder() / "jars.json").read_text())
    return folder


def archive_of(broker: EmbeddedKafka, folder: Path) -> ClassArchive:
    return ClassArchive(folder, *broker._java(), class_path(folder))


def put_aside(folder: Path, archive: ClassArchive, content: bytes, digest: str = "") -> Path:
    path = folder / archive._named(digest or hashlib.sha256(content).hexdigest()[:32])
    path.write_bytes(content)
    return path


def test_the_second_start_maps_what_the_first_had_made(cache: Path, tmp_path: Path):
    with EmbeddedKafka(tmp_path / "first", jars=cache) as broker:
        archive, limit = archive_of(broker, cache), time.monotonic() + MADE_WITHIN_S
        assert archive.find() is None
        while not (found := archive.find()) and time.monotonic() < limit:
            time.sleep(0.2)
    assert found
    assert not list(cache.glob("classes.making*"))
    with EmbeddedKafka(tmp_path / "second", jars=cache) as broker:
        assert str(found) in {region.path for region in psutil.Process(broker.pid).memory_maps()}
        assert not (broker.data_dir / "classes.lst").exists()
        assert "[warning]" not in broker.log_file.read_text()


def test_a_broker_that_stops_ends_the_making(cache: Path, tmp_path: Path):
    broker = EmbeddedKafka(tmp_path / "data", jars=cache)
    broker.start()
    assert broker._maker is not None
    maker = broker._maker.pid
    broker.stop()
    assert not psutil.pid_exists(maker)
    assert archive_of(broker, cache).find() is None


def test_an_archive_that_java_refuses_is_passed_over_in_silence(cache: Path, tmp_path: Path):
    broker = EmbeddedKafka(tmp_path / "data", jars=cache)
    put_aside(cache, archive_of(broker, cache), b"of another program" * 100_000)
    with broker:
        assert broker.pid
        assert "[warning]" not in broker.log_file.read_text()
        assert "[error]" not in broker.log_file.read_text()


def test_a_broken_archive_is_removed(cache: Path, tmp_path: Path):
    archive = archive_of(EmbeddedKafka(tmp_path / "data", jars=cache), cache)
    broken = put_aside(cache, archive, b"half of", digest="0" * 32)
    assert archive.using() == []
    assert not broken.exists()
    whole = put_aside(cache, archive, b"all of it")
    assert archive.find() == whole


def test_none_is_made_where_none_can_be_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = archive_of(EmbeddedKafka(tmp_path / "data", jars=cache), cache)
    assert archive.wanted()
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *_: False)
        assert not archive.wanted()
    with monkeypatch.context() as patched:
        patched.setattr("infra.class_archive.BYTES_FREE_MIN", 1 << 60)
        assert not archive.wanted()
    assert not ClassArchive(tmp_path / "nowhere", archive._java, (), ()).wanted()


def test_of_two_at_once_one_makes_it_and_a_failure_is_not_repeated(cache: Path, tmp_path: Path):
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nsleep 2\nexit 1\n")
    java.chmod(0o755)
    (tmp_path / "jdk" / "release").write_text('JAVA_VERSION="25.0.2"\n')
    (tmp_path / "classes.lst").write_text("java/lang/Object id: 0\n")
    archive = ClassArchive(cache, java, ("-Xmx64m",), ())
    assert archive.wanted()
    for process in [subprocess.Popen(archive.making(tmp_path / "classes.lst")) for _ in range(2)]:
        assert process.wait(60) == 0
    assert (tmp_path / "runs").read_text() == "run\n"
    assert not archive.wanted()
    assert not list(cache.glob("classes.making*"))


def test_each_java_each_list_of_jars_and_each_option_has_its_own(cache: Path, tmp_path: Path):
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"1")
    names = {ClassArchive(cache, tmp_path / "jdk/bin/java", options, [jar])._name for options in ((), ("-Xmx1m",))}
    jar.write_bytes(b"22")
    names.add(ClassArchive(cache, tmp_path / "jdk/bin/java", (), [jar])._name)
    names.add(ClassArchive(cache, tmp_path / "other/bin/java", (), [jar])._name)
    assert len(names) == 4
