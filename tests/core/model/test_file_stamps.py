"""Stamps of files: what changes them, and when they can be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miniort.model.file_stamps import FileStamp, digest_of_samples


def test_a_stamp_tells_a_change_of_size_of_time_and_of_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12345")
    first = FileStamp.of(file)
    assert first.same_file(FileStamp.of(file))
    os.utime(file, ns=(first.changed, first.changed + 1))
    assert not first.same_file(FileStamp.of(file))
    os.utime(file, ns=(first.changed, first.changed))
    assert not first.same_file(FileStamp.of(file)), "its entry has changed"
    other = tmp_path / "other"
    other.write_bytes(b"54321")
    os.utime(other, ns=(first.changed, first.changed))
    os.replace(other, file)
    assert not first.same_file(FileStamp.of(file))


@pytest.mark.parametrize(("age", "settled"), [(0, False), (5_000_000_001, True), (-60_000_000_001, False)])
def test_a_file_that_was_only_just_written_is_not_settled(tmp_path: Path, age: int, settled: bool) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12345")
    time = file.stat().st_mtime_ns - age
    os.utime(file, ns=(time, time))
    assert FileStamp.of(file).settled is settled


def test_times_in_whole_seconds_are_trusted_later(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12345")
    second = 1_000_000_000
    whole = (file.stat().st_mtime_ns // second - 1) * second
    os.utime(file, ns=(whole, whole))
    assert not FileStamp.of(file).settled
    os.utime(file, ns=(whole - second * 2, whole - second * 2))
    assert FileStamp.of(file).settled


@pytest.mark.parametrize("size", [0, 5, 4096, 10_000, 3_000_000])
def test_samples_reach_both_ends(tmp_path: Path, size: int) -> None:
    file = tmp_path / "weights"
    content = bytearray(size)
    file.write_bytes(content)
    first = digest_of_samples(file)
    for place in {0, size - 1} if size else ():
        changed = content.copy()
        changed[place] = 1
        file.write_bytes(changed)
        assert digest_of_samples(file) != first
