"""TensorBoard shows the rows of metrics.jsonl, each once."""

import pytest
from tensorboard.backend.event_processing import event_file_loader

from vit_jax.writers.metric_writer import MetricLog, read_metrics


def events(workdir):
  """Returns what TensorBoard reads of a run, as rows of metrics.jsonl."""
  rows = []
  for path in sorted((workdir / "tensorboard").glob("*tfevents*")):
    for event in event_file_loader.LegacyEventFileLoader(str(path)).Load():
      if event.HasField("summary"):
        values = {v.tag: v.simple_value for v in event.summary.value}
        time = pytest.approx(event.wall_time, abs=0.1)
        row = {"step": event.step, "time": time}
        rows.append(row | values)
  return rows


def test_a_resumed_run_has_no_row_twice(tmp_path):
  with MetricLog(str(tmp_path)) as log:
    log.write(10, {"train/loss": 1.0})
    log.write(10, {"val/top1": 0.5})
    log.write(12, {"train/loss": 0.25, "train/lr": 0.125})
  with MetricLog(str(tmp_path), 10) as log:
    log.write(12, {"train/loss": 0.75, "train/lr": 0.125})
    assert events(tmp_path) == read_metrics(str(tmp_path))  # at once
  assert events(tmp_path) == read_metrics(str(tmp_path))
  assert [r["step"] for r in events(tmp_path)] == [10, 10, 12]
  assert events(tmp_path)[-1]["train/loss"] == 0.75


def test_files_of_other_writers_are_replaced(tmp_path):
  folder = tmp_path / "tensorboard"
  folder.mkdir()
  (folder / "events.out.tfevents.1795331887.vm.29493.0.v2").write_bytes(b"old")
  MetricLog(str(tmp_path)).close()
  assert events(tmp_path) == []
  assert len(list(folder.iterdir())) == 1
