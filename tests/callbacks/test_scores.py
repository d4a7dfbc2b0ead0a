"""Scores reach callbacks, those before the first step, too."""

import tiny

from vit_jax.callbacks import Callback
from vit_jax.train import train_and_evaluate


class _Scores(Callback):
  def __init__(self):
    self.seen = []

  def on_scores(self, step, scores):
    self.seen.append((step, scores["digits/top1"]))


def test_a_callback_sees_the_scores_of_every_evaluation(tmp_path):
  ops = "decode|resize(16)"
  score = dict(kind="classification", dataset="digits", split="test[:64]")
  config = tiny.config(
    total_steps=2,
    evals__digits=dict(score, ops=ops, every_steps=1, at_start=True),
  )
  callback = _Scores()
  train_and_evaluate(config, str(tmp_path), tiny.Data(), callbacks=[callback])
  assert [step for step, _ in callback.seen] == [0, 1, 2]
  # The head begins at zero: the first class of all.
  assert 0.05 < callback.seen[0][1] < 0.2
