"""Alarms of a collapse, without labels: lines in the log of a run.

    config.callbacks = (
      "vit_jax.self_supervised.collapse:CollapseAlarm(prototypes=65536)",
    )

A loss does not show a collapse: it is low if the teacher gives all images the
same target.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vit_jax.callbacks.base import Callback
from vit_jax.writers import console

if TYPE_CHECKING:
  from vit_jax.step import TrainState

LEAST_TARGETS = 1.05
IN_A_ROW = 3
LEAST_RANK = 2.0
RANK_SHARE = 0.5
NEAREST_SHARE = 0.1


class CollapseAlarm(Callback):
  """Warns if targets or features of a run become the same for all images.

  Each warning is printed once, and again only after what it is about has
  recovered, also after a resume.

  - Targets: fewer than 1.05 different ones, in 3 logged steps in a row. Their
    number is exp(I), where I is what a target says about its image, in nats:

      I = H(mean target) - mean H(target) = log K - teacher_kl - teacher_entropy

    It is 1 in both collapses, to the uniform distribution (entropy log K) and
    to one prototype (divergence of the mean log K), and at most the number of
    images in a batch. DINO of 213,000 parameters on digits, K = 256, had 1.16
    or more in each logged step; without centring it had 1.001 from step 60.
  - Features, by each evaluator of kind `rankme`: an effective rank below 2, as
    of one direction; or below half of the highest of this run; or a distance to
    the nearest other image below a tenth of the largest of this run. Set the
    evaluator's `at_start`: the same model had 17.9 and 0.0142 untrained, 15.3
    and 0.0112 after 400 steps, and 4.9 and 0.0011 without centring.

  Args:
    prototypes: Length K of a target, for an objective that logs
      `teacher_entropy` and `teacher_kl`; None for others.
    note: Prints a line.
  """

  name = "collapse"

  def __init__(
    self,
    prototypes: int | None = None,
    note: Callable[[str], None] = console.note,
  ):
    self._prototypes, self._note = prototypes, note
    self._best: dict[str, float] = {}  # name of a score -> its largest value
    self._warned: set[str] = set()
    self._in_a_row = 0

  def on_start(self, start: int, state: "TrainState", saved: Mapping) -> None:
    before = saved.get(self.name, {})
    self._best = dict(before.get("best", {}))
    self._warned = {*before.get("warned", ())}

  def state_dict(self, step: int) -> dict:
    return {"best": dict(self._best), "warned": sorted(self._warned)}

  def on_log(self, step: int, values: dict[str, float]) -> dict[str, float]:
    """Checks the targets.

    Raises:
      ValueError: The run has targets of another length than `prototypes`.
    """
    if "teacher_entropy" not in values:
      return values
    entropy, kl = values["teacher_entropy"], values["teacher_kl"]
    most = math.log(self._prototypes or 1)
    if entropy + kl > most + 0.01:  # beyond rounding
      raise ValueError(
        f"config.callbacks: got CollapseAlarm(prototypes={self._prototypes}) in"
        f" a run with teacher_entropy {entropy:.4g} and teacher_kl {kl:.4g},"
        " which are log K together at most; expected the K of the objective."
      )
    number = math.exp(most - kl - entropy)
    self._in_a_row = self._in_a_row + 1 if number < LEAST_TARGETS else 0
    shape = "uniform" if entropy > kl else "of one prototype"
    self._warn(
      "targets",
      self._in_a_row >= IN_A_ROW,
      f"at step {step:,} the teacher's targets are the same for all images,"
      f" almost {shape} (entropy {entropy:.3g} of log K = {most:.3g} nats, mean"
      f" {kl:.3g} from uniform), so that nothing is learned from them; check"
      " centring and the teacher's temperature, or start again with a lower"
      " learning rate or a teacher's momentum nearer to 1",
    )
    return values

  def on_scores(self, step: int, scores: Mapping[str, float]) -> None:
    """Checks the features."""
    for name, value in scores.items():
      metric = name.rsplit("/", 1)[-1]
      if metric not in ("rankme", "nearest"):
        continue
      best = self._best[name] = max(value, self._best.get(name, value))
      share, what, least = NEAREST_SHARE, "distance to the nearest image", 0.0
      if metric == "rankme":
        share, what, least = RANK_SHARE, "effective rank", LEAST_RANK
      self._warn(
        name,
        value < max(share * best, least),
        f"at step {step:,} {name}, the {what} of the features, is {value:.3g}"
        f" (highest so far: {best:.3g}), so that images differ less and less"
        " for the model; if scores with labels fell, too, take an earlier"
        " checkpoint, and go on with a lower learning rate or a teacher that"
        " changes more slowly",
      )

  def _warn(self, kind: str, is_bad: bool, text: str) -> None:
    if is_bad and kind not in self._warned:
      self._note(f"collapse    {text}")
    (self._warned.add if is_bad else self._warned.discard)(kind)
