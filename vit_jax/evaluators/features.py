"""Frozen features of a split: what evaluators that need no head begin with."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from vit_jax.batch import DataError
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  several_classes,
)
from vit_jax.options import option

Rows = dict[str, np.ndarray]  # x float [n, d]; label, index int [n]


@dataclasses.dataclass(frozen=True)
class FeaturesConfig(EvaluatorConfig):
  """Options of evaluators that learn from one split and score another."""

  train_split: str = option("train", "split that is learned from")
  layer: str = option("pre_logits", "which intermediate is the feature")

  SPLITS: ClassVar[tuple[str, ...]] = ("train_split", "split")

  def check(
    self, where: str, sources: Mapping[str, Any], head: Any, out: Any
  ) -> Iterator[str]:
    """Yields a fault for an unknown layer, or for several classes."""
    import jax

    try:
      jax.eval_shape(lambda out: layer_of(out, self.layer), out)
    except ValueError as e:
      yield f"{where}.layer: {e}"
    if sources["split"].is_multilabel:
      yield several_classes(where, sources["split"])


class Features(Evaluator):
  """Extracts the features of two splits, the one to learn from first.

  With fake data, the first two batches of each are used, or `least` records if
  that is more.
  """

  def __init__(self, context: Context, least: int = 0):
    super().__init__(context)
    train, test = (context.sources[k] for k in ("train_split", "split"))
    self.note = learns_from(self.config, train, test)
    if context.config.fake_data:  # a trial
      most = max(2 * self.config.batch_size, least)
      train, test = (
        dataclasses.replace(s, num_examples=min(s.num_examples, most))
        for s in (train, test)
      )
    self.num_classes = train.num_classes
    self._train, self._test = train, test
    layer = self.config.layer

    def features(params, batch):
      _, out = context.predict(params, batch["image"])
      rows = {k: batch[k] for k in ("label", "mask", "index")}
      return {"x": layer_of(out, layer), **rows}

    # Shared with few-shot evaluators, which extract the same.
    self._features = context.once(
      ("features", layer), lambda: context.jit(features)
    )

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"features": self._features}

  def splits(self, params: Any) -> tuple[Rows, Rows]:
    """Returns the rows to learn from, and those to score; all processes.

    Raises:
      DataError: As `extract`.
    """
    return tuple(
      extract(self.context, source, self._features, params)
      for source in (self._train, self._test)
    )


def learns_from(options: FeaturesConfig, train: Any, test: Any) -> str:
  """Returns a line on the splits that are learned from and scored."""
  return (
    f"{options.dataset}, learns from [{options.train_split}]"
    f" ({train.num_examples:,} images, {train.num_classes:,} classes), scored"
    f" on [{options.split}] ({test.num_examples:,})"
  )


def extract(
  context: Context,
  source: Any,
  fn: Callable,
  params: Any,
  indices: np.ndarray | None = None,
) -> Rows:
  """Returns features, labels and indices, in the order of the records.

  Images that could not be decoded, or have no label (-1), are left out.

  Args:
    context: Context of the evaluator.
    source: Split to read.
    fn: (params, global batch) -> {"x", "label", "mask", "index"}, as
      `Context.jit` returns it.
    params: Its first argument.
    indices: The records to read; None: all.

  Raises:
    DataError: None is left, or a feature is not finite; in all processes,
      since all get the same rows.
  """
  batches = context.batches(source, indices)
  parts = list(context.forward(fn, params, batches))
  # Freed part by part, and copied once: ImageNet's features are 4 GB.
  rows = {k: np.concatenate([p.pop(k) for p in parts]) for k in [*parts[0]]}
  order = np.flatnonzero(rows["mask"] & (rows["label"] >= 0))
  options = context.options
  if not len(order):
    raise DataError(
      f"config.evals.{options.name}: got {options.dataset!r} [{source.split}],"
      " of which no image has a label; expected another split."
    )
  order = order[np.argsort(rows["index"][order])]
  rows = {k: rows.pop(k)[order] for k in [*rows]}
  with np.errstate(invalid="ignore"):  # inf - inf, which is told below
    is_finite = np.isfinite(rows["x"].sum(axis=1, dtype=np.float64))
  if not is_finite.all():
    raise DataError(
      f"config.evals.{options.name}.layer: got {options.layer!r}, of which"
      f" {(~is_finite).sum():,} of {len(is_finite):,} rows hold NaN or infinity"
      f" for {options.dataset!r} [{source.split}]. The model has diverged, or"
      " its dtype overflows."
    )
  return rows


def layer_of(out: dict, path: str) -> Any:
  """Finds "encoderblock_3/mlp" in nested dicts, the mean over tokens if any.

  Raises:
    ValueError: There is none; the message lists the names.
  """
  found = out
  for key in path.split("/"):
    if not isinstance(found, dict) or key not in found:
      known = sorted(found) if isinstance(found, dict) else []
      raise ValueError(
        f"got {path!r}, expected a name among {', '.join(known)} at {key!r}."
      )
    found = found[key]
  if isinstance(found, dict):
    raise ValueError(f"got {path!r}, expected {path}/ and {', '.join(found)}.")
  return found.mean(axis=tuple(range(1, found.ndim - 1)))
