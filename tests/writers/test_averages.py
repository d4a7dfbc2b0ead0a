"""Means over the evaluators of a group, once, and after an interruption too."""

from types import SimpleNamespace

import pytest

from vit_jax.writers.averages import Averages, groups

EVALS = [
  SimpleNamespace(name=name, group=group)
  for name, group in (("a", "few"), ("val", None), ("b", "few"), ("c", "knn"))
]


def test_the_last_of_a_group_brings_the_mean():
  averages = Averages(EVALS)
  first = {"a/1shot": 0.25, "a/l2=4/1shot": 0.5, "a/only": 1.0}
  assert averages.with_means(10, first) == first
  assert averages.with_means(10, {"val/top1": 0.0}) == {"val/top1": 0.0}
  last = {"b/1shot": 0.75, "b/l2=4/1shot": 0.5}
  # What not all of them have is not averaged.
  assert averages.with_means(10, last) == last | {
    "few/1shot": 0.5,
    "few/l2=4/1shot": 0.5,
    "few/sets": 2,
  }
  alone = averages.with_means(10, {"c/top1": 0.125})
  assert alone == {"c/top1": 0.125, "knn/top1": 0.125, "knn/sets": 1}


def test_steps_do_not_mix():
  averages = Averages(EVALS)
  averages.with_means(10, {"a/x": 0.0})
  assert averages.with_means(20, {"b/x": 1.0}) == {"b/x": 1.0}
  assert averages.with_means(10, {"b/x": 0.5})["few/x"] == 0.25
  assert averages.with_means(20, {"a/x": 0.0})["few/x"] == 0.5


@pytest.mark.parametrize("step, has_mean", [(10, True), (20, False)])
def test_scores_from_before_an_interruption_count(step, has_mean):
  averages = Averages(EVALS, 10, {"a/x": 0.0, "val/top1": 0.5})
  found = averages.with_means(step, {"b/x": 1.0})
  assert found.get("few/x") == (0.5 if has_mean else None)


def test_groups_in_their_order():
  names = {g: [e.name for e in members] for g, members in groups(EVALS).items()}
  assert names == {"few": ["a", "b"], "knn": ["c"]}
