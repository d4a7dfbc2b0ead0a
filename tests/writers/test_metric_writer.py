"""Metrics on disk."""

import json

from vit_jax.writers.metric_writer import METRICS, Writer, read_metrics


def test_lines_and_tensorboard(tmp_path):
  writer = Writer(str(tmp_path))
  writer.scalars(1, {"train/loss": 2.0})
  writer.scalars(2, {"val/top1": 0.5})
  writer.close()
  rows = read_metrics(str(tmp_path))
  assert [r["step"] for r in rows] == [1, 2]
  assert rows[0]["train/loss"] == 2.0 and rows[1]["val/top1"] == 0.5
  assert all(r["time"] > 1e9 for r in rows)
  assert list((tmp_path / "tensorboard").glob("*tfevents*"))


def test_resuming_drops_what_will_be_written_again(tmp_path):
  writer = Writer(str(tmp_path))
  writer.scalars(10, {"train/loss": 1.0})
  writer.scalars(10, {"val/top1": 0.5})
  writer.scalars(12, {"train/loss": 0.9})
  writer.close()
  with (tmp_path / METRICS).open("a") as f:
    f.write('{"step": 13, "tra')  # killed while writing
  writer = Writer(str(tmp_path), resumed_at=10)
  assert writer.scores == {"val/top1": 0.5}
  writer.scalars(12, {"train/loss": 0.8})
  writer.close()
  text = (tmp_path / METRICS).read_text().splitlines()
  assert [json.loads(line)["step"] for line in text] == [10, 10, 12]
  assert json.loads(text[-1])["train/loss"] == 0.8


def test_a_new_run_starts_with_empty_metrics(tmp_path):
  writer = Writer(str(tmp_path))
  writer.scalars(5, {"train/loss": 1.0})
  writer.close()
  Writer(str(tmp_path)).close()
  assert read_metrics(str(tmp_path)) == []
