"""Scores reach callbacks, those before the first step, too."""

import pytest


@pytest.mark.slow
def test_a_callback_sees_the_scores_of_every_evaluation(seen):
  assert [step for step, _ in seen.scores] == [0, 1, 2]
  # The head begins at zero: the first class of all.
  assert 0.05 < seen.scores[0][1] < 0.2
