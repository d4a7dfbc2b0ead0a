"""Frozen features of a split to learn from and of a split to score, for probes.

A feature is an intermediate of the model, given by its path; tokens are
averaged. Or it is a feature of DINOv2 and DINOv3:

  cls               class token after the final norm
  cls*4             class tokens of the last four blocks, each after the final
                    norm, concatenated
  cls+patches, cls*4+patches
                    the same, concatenated with the mean of the patch tokens
                    after the final norm (without registers)

Source: facebookresearch/dinov2 and dinov3, eval/linear.py.
"""

import dataclasses
import re
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
  no_images_error,
)
from vit_jax.options import option

if TYPE_CHECKING:
  import jax

  from vit_jax.families import ModelConfig

TOKENS = re.compile(r"cls(\*(?P<blocks>\d+))?(?P<patches>\+patches)?")
Rows = dict[str, np.ndarray]  # x float [n, d]; label, index int [n]


@dataclasses.dataclass(frozen=True)
class FeaturesConfig(EvaluatorConfig):
  """Options of evaluators that learn from one split and score another."""

  train_split: str = option("train", "training split")
  layer: str = option(
    "pre_logits",
    "intermediate that is the feature; or cls (class token) or cls*4 (class"
    " tokens of the last four blocks), each also with +patches (mean of the"
    " patch tokens)",
  )

  SPLITS: ClassVar[tuple[str, ...]] = ("train_split", "split")

  @property
  def alternatives(self) -> tuple[str, ...]:
    """The layers that are computed; a probe may choose among them."""
    return (self.layer,)

  @property
  def layers_option(self) -> str:
    """Name of the option that has the `alternatives`."""
    return "layer"

  def model_errors(self, where: str, model: "ModelConfig") -> Iterator[str]:
    """Yields an error if the model lacks the tokens of a layer."""
    for layer in self.alternatives:
      if error := tokens_error(layer, model):
        yield f"{where}.{self.layers_option}: {error}"

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields an error for an unknown layer, or images of several classes."""
    import jax

    for layer in self.alternatives:
      try:
        if not TOKENS.fullmatch(layer):
          jax.eval_shape(lambda out, layer=layer: layer_of(out, layer), out)
      except ValueError as e:
        yield f"{where}.{self.layers_option}: {e}"
    if sources["split"].is_multilabel:
      yield multilabel_error(where, sources["split"])


class Features(Evaluator):
  """Extracts the features of the split to learn from and the split to score.

  With fake data only the first two batches of each split are read.

  Args:
    context: Context of the evaluator.
    least: Smallest number of records that are read with fake data.
  """

  def __init__(self, context: Context, least: int = 0):
    super().__init__(context)
    train, test = (context.sources[k] for k in ("train_split", "split"))
    self.note = learns_from(self.config, train, test)
    train, test = (self.few_if_fake(s, least) for s in (train, test))
    self.num_classes = train.num_classes
    self._train, self._test = train, test
    self._features = features_fn(context, self.config.alternatives)

  def programs(self) -> dict[str, Callable]:
    """See `Evaluator`."""
    return {"features": self._features}

  def splits(self, params: Params) -> tuple[Rows, Rows]:
    """Returns the rows to learn from, and the rows to score. Collective.

    Raises:
      DataError: See `extract`.
    """
    return tuple(
      extract(self.context, source, self._features, params)
      for source in (self._train, self._test)
    )


def features_fn(context: Context, layers: tuple[str, ...]) -> Callable:
  """Returns the jitted function (params, global batch) -> rows of `extract`.

  The evaluators of a run that extract the same layers share the function.

  Args:
    context: Context of the evaluator.
    layers: Names of the layers. The features have each part of the layers (see
      `parts`) once, in the order in which the parts first occur.
  """
  model = context.config.model

  def features(params, batch):
    _, out = context.predict(params, batch["image"])
    rows = {k: batch[k] for k in ("label", "mask", "index")}
    return {"x": joined(out, params, model, layers), **rows}

  return context.once(("features", *layers), lambda: context.jit(features))


def learns_from(options: EvaluatorConfig, train: Split, test: Split) -> str:
  """Returns a line about the split to learn from and the split to score."""
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
  needs_labels: bool = True,
) -> Rows:
  """Returns features, labels and indices, in the order of the records.

  Images that could not be decoded are left out.

  Args:
    context: Context of the evaluator.
    source: Split to read.
    fn: (params, global batch) -> {"x", "label", "mask", "index"}, a result of
      `Context.jit`.
    params: First argument of `fn`.
    indices: Records to read; None: all.
    needs_labels: Whether images without a label (-1) are left out, too.

  Raises:
    DataError: No image is left, or a feature is not finite. All processes raise
      it, because all have the same rows.
  """
  batches = context.batches(source, indices)
  parts = list(context.forward(fn, params, batches))
  # Arrays of a batch are freed when they are copied: ImageNet's features have
  # 4 GB.
  rows = {k: np.concatenate([p.pop(k) for p in parts]) for k in [*parts[0]]}
  is_used = rows["mask"]
  if needs_labels:
    is_used = is_used & (rows["label"] >= 0)
  order, options = np.flatnonzero(is_used), context.options
  if not len(order):
    what = "has a label" if needs_labels else "can be decoded"
    raise DataError(no_images_error(options.name, source, what))
  order = order[np.argsort(rows["index"][order])]
  rows = {k: rows.pop(k)[order] for k in [*rows]}
  with np.errstate(invalid="ignore"):  # inf - inf is reported below
    is_finite = np.isfinite(rows["x"].sum(axis=1, dtype=np.float64))
  if not is_finite.all():
    raise DataError(
      f"config.evals.{options.name}: got features of {source.name!r}"
      f" [{source.split}] with NaN or infinity for {(~is_finite).sum():,} of"
      f" {len(is_finite):,} images; expected finite features. The model has"
      " diverged, or its dtype overflows."
    )
  return rows


def joined(
  out: Outputs, params: Params, model: "ModelConfig", layers: tuple[str, ...]
) -> "jax.Array":
  """Returns the concatenated parts of some layers, [b, d].

  Args:
    out: Intermediates of the model.
    params: Parameters of the model; the final norm is applied to the class
      tokens of inner blocks.
    model: Options of the model.
    layers: See `features_fn`.

  Raises:
    ValueError: See `intermediate`.
  """
  import flax.linen as nn
  import jax.numpy as jnp

  def value(part):
    if part == "patches":
      first = model.num_class_tokens + getattr(model, "registers", 0)
      return intermediate(out, "encoded")[:, first:].mean(axis=1)
    if not (block := re.fullmatch(r"cls of (\d+)", part)):
      return layer_of(out, part)
    if int(block[1]) == depth - 1:
      return intermediate(out, "encoded")[:, 0]
    x = intermediate(out, model.AFTER_BLOCK.format(block[1]))[:, 0]
    norm = nn.LayerNorm(model.ln_eps, dtype=jnp.float32)
    of_norm = params
    for name in model.LAST_NORM.split("/"):
      of_norm = of_norm[name]
    return norm.apply({"params": of_norm}, x)

  depth = num_blocks(model) or 1
  every = dict.fromkeys(p for layer in layers for p in parts(layer, depth))
  values = [value(part) for part in every]
  return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)


def tokens_error(layer: str, model: "ModelConfig") -> str | None:
  """Returns an error if a model lacks the tokens of a layer, else None."""
  if not (match := TOKENS.fullmatch(layer)):
    return None
  if not model.num_class_tokens:
    what = f"{model.variant} with pool={model.pool!r}"
    return (
      f"got {layer!r}, but {what} has no class token; expected an intermediate,"
      " such as pre_logits."
    )
  count, depth = int(match["blocks"] or 1), num_blocks(model) or 1
  if count > 1 and None in (model.AFTER_BLOCK, model.LAST_NORM):
    family = type(model).__name__
    return (
      f"got {layer!r}, but {family} does not declare the tokens behind a block"
      f" and their norm ({family}.AFTER_BLOCK, LAST_NORM); expected cls."
    )
  if not 1 <= count <= depth:
    return f"got {layer!r}, expected a number of blocks from 1 to {depth}."
  if getattr(model, "final_norm", "tokens") != "tokens":
    return (
      f"got {layer!r}, but {model.variant} with final_norm={model.final_norm!r}"
      " has no norm of the tokens; expected an intermediate: pre_logits."
    )
  return None


def num_blocks(model: "ModelConfig") -> int | None:
  """Returns the number of blocks; None if the model does not state it."""
  return getattr(getattr(model, "size", model), "depth", None)


def parts(layer: str, depth: int | None) -> tuple[str, ...]:
  """Returns the intermediates that are concatenated in a layer.

  Args:
    layer: Name of a layer, see the docstring of this file.
    depth: Number of blocks; None if the model does not state it.

  Example:
    >>> parts("cls*2+patches", depth=12), parts("pre_logits", depth=12)
    (('cls of 10', 'cls of 11', 'patches'), ('pre_logits',))
  """
  if not (match := TOKENS.fullmatch(layer)):
    return (layer,)
  depth = depth or 1  # of a model that does not state it, the last
  blocks = range(depth - int(match["blocks"] or 1), depth)
  patches = ("patches",) if match["patches"] else ()
  return (*(f"cls of {i}" for i in blocks), *patches)


def layer_of(out: Outputs, path: str) -> "jax.Array":
  """Returns an intermediate [b, d], such as "encoderblock_3/mlp".

  Tokens [b, n, d] and maps [b, h, w, d] are averaged.

  Raises:
    ValueError: See `intermediate`.
  """
  layer = intermediate(out, path)
  return layer.mean(axis=tuple(range(1, layer.ndim - 1)))


def intermediate(out: Outputs, path: str) -> "jax.Array":
  """Returns the intermediate with a path, such as "encoderblock_3/mlp".

  Raises:
    ValueError: There is no such intermediate; the message lists all names.
  """
  layer = out
  keys = path.split("/")
  for i, key in enumerate(keys):
    if not isinstance(layer, dict):
      whole = "/".join(keys[:i])
      raise ValueError(f"got {path!r}, expected {whole!r}, which has no parts.")
    if key not in layer:
      raise ValueError(
        f"got {path!r}, expected a name among {', '.join(sorted(layer))} at"
        f" {key!r}."
      )
    layer = layer[key]
  if isinstance(layer, dict):
    raise ValueError(
      f"got {path!r}, expected {path}/ followed by one of {', '.join(layer)}."
    )
  return layer
