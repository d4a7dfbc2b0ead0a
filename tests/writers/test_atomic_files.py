"""Small files: damaged lines are numbered, a full disk is waited for."""

import errno
import math
import os
import types

import pytest
from disk import full
from etils import epath

from vit_jax.callbacks import nonfinite
from vit_jax.checkpointing import resume_rules
from vit_jax.config import Config
from vit_jax.step import TrainState
from vit_jax.writers import atomic_files, metric_writer
from vit_jax.writers.atomic_files import Records, WriteError
from vit_jax.writers.metric_writer import MetricLog

DAMAGED = [
  b"\0\0\0\0",
  b'{"step": 2, "a',
  b'{"step": 2, "a": "\xff"}',
  b'{"a": 1}',
  b'{"step": 2.5}',
  b'{"step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_lines_are_numbered_and_left_out(tmp_path, line):
  path = epath.Path(tmp_path) / "metrics.jsonl"
  assert atomic_files.read_rows(path) == ([], [])
  path.write_bytes(b'{"step": 1, "a": 1.5}\n' + line + b'\n\n{"step": 3}\n')
  rows = [{"step": 1, "a": 1.5}, {"step": 3}]
  assert atomic_files.read_rows(path) == (rows, [2])
  path.write_bytes(b'{"step": 1, "a": NaN}\n' + line)  # killed meanwhile
  (row,), damaged = atomic_files.read_rows(path)
  assert math.isnan(row["a"]) and damaged == [2]


def _nonfinite(folder):
  data = types.SimpleNamespace(
    num_examples=1, num_classes=1, class_names=None, batches=iter
  )
  callback = nonfinite.NonFinite(Config(), folder, data, lambda: None, print)
  callback.on_start(1, TrainState(1, {}, ()), {})


CHANGE = resume_rules.Change(
  "log_steps", 1, 2, resume_rules.rule_of("log_steps")
)


# What a run that resumes at step 1 makes anew of what it reads.
def _changes(folder):
  resume_rules.write(folder, resume_rules.trail(folder, 1, [CHANGE]))


REPLACED = {
  metric_writer.METRICS: lambda folder: MetricLog(folder, 1).close(),
  resume_rules.FILE: _changes,
  nonfinite.FILE: _nonfinite,
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_file_that_cannot_be_read_is_not_replaced(
  tmp_path, monkeypatch, name
):
  """A file server that does not answer once takes no rows with it."""
  path, folder = epath.Path(tmp_path) / name, str(tmp_path)
  REPLACED[name](folder)  # there is none: a new run

  def fails(real):
    def call(of, *args, **options):
      if str(of) == str(path):
        raise OSError(errno.ESTALE, "Stale file handle")
      return real(of, *args, **options)

    return call

  path.write_bytes(b"what it holds")
  with monkeypatch.context() as patch:
    patch.setattr(os, "stat", fails(os.stat))
    patch.setattr(type(path), "open", fails(type(path).open))
    with pytest.raises(WriteError, match=f"{path}: .*Stale"):
      REPLACED[name](folder)
  assert path.read_bytes() == b"what it holds"


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
  path = epath.Path(tmp_path) / "config.json"
  atomic_files.replace(path, "old")
  with monkeypatch.context() as patch:
    patch.setattr(atomic_files, "write", full)
    with pytest.raises(WriteError, match=f"{path}: .*No space"):
      atomic_files.replace(path, "new")
  assert path.read_text() == "old"


class _Disk:
  """Appends, unless it is full: then a part of the text is left behind."""

  def __init__(self, monkeypatch):
    self.is_full, self._append = False, atomic_files.append
    monkeypatch.setattr(atomic_files, "append", self)

  def __call__(self, path, text, size):
    if self.is_full:
      self._append(path, text[: len(text) // 2], size)
      full()
    return self._append(path, text, size)


@pytest.fixture
def disk(monkeypatch):
  return _Disk(monkeypatch)


def _records(tmp_path, disk, *lines, note=lambda _: None):
  """Records of which the first is on disk, and the others wait for room."""
  records = Records(epath.Path(tmp_path) / "metrics.jsonl", b"", note)
  for i, line in enumerate(lines):
    disk.is_full = i > 0
    records.append(line)
  return records


def test_records_wait_for_a_disk_and_are_whole(tmp_path, disk):
  notes, lines = [], (b"1\n", b"22\n", b"33\n", b"44\n")
  records = _records(tmp_path, disk, *lines, note=notes.append)
  path = tmp_path / "metrics.jsonl"
  assert path.read_text().startswith("1\n")
  assert len(notes) == 1 and "No space" in notes[0]
  disk.is_full = False
  records.append(b"55\n")
  assert path.read_text() == "1\n22\n33\n44\n55\n"
  assert "4 records" in notes[1]
  assert records.close() is None


@pytest.mark.parametrize("is_full", [False, True])
def test_records_that_never_can_be_written_are_kept_elsewhere(
  tmp_path, monkeypatch, disk, is_full
):
  """If the other folder is full as well, they are lost, and it says so."""
  other = tmp_path / "other"
  other.mkdir()
  monkeypatch.setattr(atomic_files.tempfile, "gettempdir", lambda: str(other))
  rows = [f'{{"step": {i}}}\n'.encode() for i in (1, 2, 3)]
  records = _records(tmp_path, disk, *rows)
  if is_full:
    monkeypatch.setattr(atomic_files, "write", full)
  text = records.close()
  assert "No space" in text and "last 2 records" in text
  assert ("lost" in text) == is_full
  kept = [*other.iterdir()]
  assert len(kept) == (not is_full)
  assert all(str(p) in text for p in kept)
  assert all(p.read_bytes() == b"".join(rows[1:]) for p in kept)


def test_records_do_not_wait_for_ever(tmp_path, monkeypatch, disk):
  monkeypatch.setattr(atomic_files, "MAX_WAITING", 3)
  with pytest.raises(WriteError, match="3 records"):
    _records(tmp_path, disk, b"0", b"1", b"2", b"3")


def test_a_file_that_someone_deleted_is_begun_again(tmp_path):
  path = epath.Path(tmp_path) / "run" / "metrics.jsonl"
  path.parent.mkdir()
  lines = Records(path, b"1\n", lambda _: None)
  path.unlink()
  lines.append(b"2\n")
  assert path.read_text() == "2\n"  # not a hole of NULs before it
  path.parent.rmtree()
  lines.append(b"3")
  assert not path.parent.exists()  # no half a run
