"""Frozen features of two splits, from which probes learn and are scored."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vit_jax.batch import DataError
from vit_jax.class_names import Head
from vit_jax.evaluators.evaluator import (
  Context,
  Evaluator,
  EvaluatorConfig,
  Outputs,
  Params,
  Split,
  Splits,
  multilabel_error,
)
from vit_jax.options import option

if TYPE_CHECKING:
  import jax

Rows = dict[str, np.ndarray]  # x float [n, d]; label, index int [n]


@dataclasses.dataclass(frozen=True)
class FeaturesConfig(EvaluatorConfig):
  """Options of evaluators that learn from one split and score another."""

  train_split: str = option("train", "split that is learned from")
  layer: str = option("pre_logits", "which intermediate is the feature")

  SPLITS: ClassVar[tuple[str, ...]] = ("train_split", "split")

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error for an unknown layer, or for several classes."""
    import jax

    try:
      jax.eval_shape(lambda out: layer_of(out, self.layer), out)
    except ValueError as e:
      yield f"{where}.layer: {e}"
    if sources["split"].is_multilabel:
      yield multilabel_error(where, sources["split"])


class Features(Evaluator):
  """Extracts the features of the split to learn from and of that to score.

  With fake data only the first two batches of each are read.

  Args:
    context: Its context.
    least: Records of each split that are read of fake data, if two batches have
      fewer.
  """

  def __init__(self, context: Context, least: int = 0):
    super().__init__(context)
    train, test = (context.sources[k] for k in ("train_split", "split"))
    self.note = learns_from(self.config, train, test)
    if context.config.fake_data:
      most = max(2 * self.config.batch_size, least)
      train, test = (
        dataclasses.replace(s, num_examples=min(s.num_examples, most))
        for s in (train, test)
      )
    self.num_classes = train.num_classes
    self._train, self._test = train, test
    self._features = features_fn(context, self.config.layer)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"features": self._features}

  def splits(self, params: Params) -> tuple[Rows, Rows]:
    """Returns the rows to learn from, and those to score. Collective.

    Raises:
      DataError: As `extract`.
    """
    return tuple(
      extract(self.context, source, self._features, params)
      for source in (self._train, self._test)
    )


def features_fn(context: Context, layer: str) -> Callable:
  """Returns (params, global batch) -> what `extract` needs, jitted.

  The evaluators of a run that extract the same layer share it.
  """

  def features(params, batch):
    _, out = context.predict(params, batch["image"])
    rows = {k: batch[k] for k in ("label", "mask", "index")}
    return {"x": layer_of(out, layer), **rows}

  return context.once(("features", layer), lambda: context.jit(features))


def learns_from(options: FeaturesConfig, train: Split, test: Split) -> str:
  """Returns a line on the splits that are learned from and scored."""
  return (
    f"{options.dataset}, learns from [{options.train_split}]"
    f" ({train.num_examples:,} images, {train.num_classes:,} classes), scored"
    f" on [{options.split}] ({test.num_examples:,})"
  )


def extract(
  context: Context,
  source: Split,
  fn: Callable,
  params: Params,
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
    DataError: No image is left, or a feature is not finite. All processes
      raise it, since all have the same rows.
  """
  batches = context.batches(source, indices)
  parts = list(context.forward(fn, params, batches))
  # Parts are freed one by one, and copied once: ImageNet's features are 4 GB.
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
  with np.errstate(invalid="ignore"):  # inf - inf is reported below
    is_finite = np.isfinite(rows["x"].sum(axis=1, dtype=np.float64))
  if not is_finite.all():
    raise DataError(
      f"config.evals.{options.name}.layer: got {options.layer!r}, of which"
      f" {(~is_finite).sum():,} of {len(is_finite):,} rows hold NaN or infinity"
      f" for {options.dataset!r} [{source.split}]. The model has diverged, or"
      " its dtype overflows."
    )
  return rows


def layer_of(out: Outputs, path: str) -> "jax.Array":
  """Returns an intermediate [b, d], such as "encoderblock_3/mlp".

  If it has tokens or a map, it is their mean.

  Raises:
    ValueError: See `intermediate`.
  """
  layer = intermediate(out, path)
  return layer.mean(axis=tuple(range(1, layer.ndim - 1)))


def intermediate(out: Outputs, path: str) -> "jax.Array":
  """Returns what a model returns under a name, such as "encoderblock_3/mlp".

  Raises:
    ValueError: There is none; the message lists the names.
  """
  layer = out
  for key in path.split("/"):
    if not isinstance(layer, dict) or key not in layer:
      known = sorted(layer) if isinstance(layer, dict) else []
      raise ValueError(
        f"got {path!r}, expected a name among {', '.join(known)} at {key!r}."
      )
    layer = layer[key]
  if isinstance(layer, dict):
    raise ValueError(f"got {path!r}, expected {path}/ and {', '.join(layer)}.")
  return layer
