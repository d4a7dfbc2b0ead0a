"""The interface of an evaluator: options, checks, context, two phases."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
  TYPE_CHECKING,
  Any,
  ClassVar,
  NamedTuple,
  Protocol,
  runtime_checkable,
)

import numpy as np

from vit_jax.batch import Batch
from vit_jax.class_names import Head
from vit_jax.objectives import Objective
from vit_jax.options import option, unexpected

if TYPE_CHECKING:
  import jax

  from vit_jax.families import ModelConfig

Params = dict[str, Any]  # nested, of arrays
Outputs = dict[str, Any]  # a model's intermediates by name, nested


@runtime_checkable
class Split(Protocol):
  """A split of a data set: a `Source`, or the planner's description of one.

  Attributes:
    name: Name of the data set.
    split: Name of the split, slices included.
    num_examples: Number of records.
    num_classes: Number of classes.
    class_names: Names by label; None if the data set has none.
    is_multilabel: Whether an image may have any number of classes.
    is_regression: Whether an image has numbers to predict.
    knows_labels: Whether `labels` need not read the whole split.
  """

  name: str
  split: str
  num_examples: int
  num_classes: int
  class_names: tuple[str, ...] | None
  is_multilabel: bool
  is_regression: bool
  knows_labels: bool

  def labels(self) -> np.ndarray:
    """Returns all labels.

    Returns:
      int32 [n], -1 for none; for multi-label data bool [n, classes], for
      regression float32 [n, outputs].
    """


Splits = Mapping[str, Split]  # option of `SPLITS` -> its split


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
  """The options of all evaluators: what is scored, and when.

  Class attributes:
    SPLITS: Options whose value is a split of `dataset`. A split that several
      evaluators use is opened once.
    scores_head: Whether the evaluator scores the logits, which needs a head.
      The summary of a run has the score of the first such evaluator.
    scores_numbers: Whether labels and outputs are numbers (regression) and not
      classes.
    LEFT_OUT_BY: Name and value of an option of the config. With this value a
      run leaves the evaluator out if its data set is not on disk. None: never.
  """

  name: str = ""  # the key under evals, and prefix of the metrics
  kind: str = ""  # the key of EVALUATORS, or the import path
  dataset: str | None = option(
    None, "data set, named as in data.dataset; None: data.dataset"
  )
  split: str = option("test", "split to score")
  ops: str = option("decode|resize(256)|central_crop(224)", "preprocessing")
  batch_size: int | None = option(
    None, "images per batch, over all devices; None: data.batch_size"
  )
  every_steps: int = option(0, "steps between evaluations; 0: only at the end")
  at_start: bool = option(
    False, "whether the parameters before the first step are scored, too"
  )
  group: str | None = option(
    None,
    "group of this evaluator; the mean of a group is written as"
    " <group>/<metric>; None: no group",
  )

  SPLITS: ClassVar[tuple[str, ...]] = ("split",)
  scores_head: ClassVar[bool] = False
  scores_numbers: ClassVar[bool] = False
  LEFT_OUT_BY: ClassVar[tuple[str, str] | None] = None

  def resolved(
    self, dataset: str | None, batch_size: int | None
  ) -> "EvaluatorConfig":
    """Returns the options, with the arguments in place of None."""
    return dataclasses.replace(
      self,
      dataset=self.dataset or dataset,
      batch_size=self.batch_size or batch_size,
    )

  def models(self) -> dict[str, str]:
    """Returns name -> weights of the further models that it compares with.

    The weights are anything that `vit_jax.load` reads; positions are resized
    for the images of `ops`. See `Context.models`.
    """
    return {}

  def errors(self, where: str) -> Iterator[str]:
    """Yields the errors that can be seen in the options, one text each.

    Args:
      where: Path of these options, "config.evals.<name>".
    """
    if self.name == "train" or "/" in self.name:
      yield unexpected(where, repr(self.name), "another name, without '/'")
    if self.batch_size is not None and self.batch_size < 1:
      yield unexpected(f"{where}.batch_size", self.batch_size, "1 or more")
    if self.every_steps < 0:
      yield unexpected(f"{where}.every_steps", self.every_steps, "0 or more")

  def kind_errors(
    self, where: str, sources: Splits, head: Head
  ) -> Iterator[str]:
    """Yields an error if data or head have numbers instead of classes.

    If `scores_numbers`, yields an error if they have classes instead of
    numbers. Arguments: see `check`, which is called only without such an error.
    """
    labels = ("classes", "numbers to predict")
    wanted, other = labels[self.scores_numbers], labels[not self.scores_numbers]
    other_kind = "classification" if self.scores_numbers else "regression"
    kind = other_kind
    if any(source.is_multilabel for source in sources.values()):
      kind = "multilabel"
    for source in sources.values():
      if source.is_regression != self.scores_numbers:
        got = f"{source.name!r}, whose images have {other}"
        hint = f"{where}.kind={kind!r} scores {other}."
        yield unexpected(f"{where}.dataset", got, wanted, hint)
    is_regression = head.loss == "regression"
    if not self.scores_head or is_regression == self.scores_numbers:
      return
    expected = f"{other_kind!r}, because the head has {other}"
    hint = "(The weights do not state their loss.)" if head.is_assumed else ""
    yield unexpected(f"{where}.kind", repr(self.kind), expected, hint)

  def model_errors(self, where: str, model: "ModelConfig") -> Iterator[str]:
    """Yields the errors that can be seen in the options of the model.

    Args:
      where: Path of these options, "config.evals.<name>".
      model: config.model.
    """
    return iter(())

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields the errors that can be seen in data and model, before the run.

    Args:
      where: Path of these options, "config.evals.<name>".
      sources: Option of `SPLITS` -> its split. If the data set is not prepared
        yet, the records are fake, but the number of records and classes are
        right.
      head: Classes of the logits.
      out: Shapes of the model's intermediates for one image.
    """
    return iter(())

  def num_images(self, sources: Splits) -> tuple[int, ...]:
    """Returns, for each split, an upper bound of the images of one evaluation.

    Args:
      sources: Option of `SPLITS` -> its split; only num_examples and
        num_classes are used.
    """
    return tuple(source.num_examples for source in sources.values())

  def make(self, context: "Context") -> "Evaluator":
    """Returns the evaluator with these options."""
    raise NotImplementedError(type(self).__name__)


@runtime_checkable
class RunConfig(Protocol):
  """The part of a `Config` that evaluators use (its layer is above)."""

  model: "ModelConfig"
  objective: Objective
  fake_data: bool


class OtherModel(NamedTuple):
  """A further model of an evaluator.

  params: Its parameters, on the mesh.
  predict: As `Context.predict`.
  """

  params: Params
  predict: Callable[[Params, Any], tuple[Any, Outputs]]


@dataclasses.dataclass(frozen=True)
class Context:
  """What an evaluator gets from its run; implemented in `vit_jax.eval_context`.

  Attributes:
    options: Options of the evaluator; dataset and batch_size are set.
    config: Config of the run.
    sources: Option of `options.SPLITS` -> the opened split.
    predict: (params, uint8 images) -> (logits, out), not jitted. For
      activations that `for_logits` returned: (logits, {}).
    mesh: Mesh of the run.
    random_params: Returns newly initialised parameters, for baselines.
    head: Classes of the logits.
    workdir: Folder of the run, for files of an evaluator; None: an evaluator
      writes no file.
    shared: Values that the evaluators of a run share, see `once`.
    on_batch: All processes call it before every batch; if it raises, the
      evaluation ends.
    models: The models of `options.models`, by their names.
  """

  options: EvaluatorConfig
  config: RunConfig
  sources: Splits
  predict: Callable[[Params, Any], tuple[Any, Outputs]]
  mesh: "jax.sharding.Mesh"
  random_params: Callable[[], Params]
  head: Head
  workdir: str | None = None
  shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
  on_batch: Callable[[], None] = lambda: None
  models: Mapping[str, OtherModel] = dataclasses.field(default_factory=dict)

  def once(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns the result of `make` for the first evaluator with this key.

    Evaluators that differ only in their data thus compile a function once.
    """
    if key not in self.shared:
      self.shared[key] = make()
    return self.shared[key]

  def jit(self, fn: Callable[[Params, dict], Any]) -> Callable:
    """Returns (params, global batch) -> results, jitted, on every device."""
    raise NotImplementedError

  def labels(self, source: Split) -> np.ndarray:
    """Returns all labels of a split, see `Split.labels`. Collective.

    If the labels are in the records, each process reads a part of them.

    Args:
      source: One of `sources`.
    """
    raise NotImplementedError

  def batches(
    self, source: Split, indices: np.ndarray | None = None
  ) -> Iterator[Batch]:
    """Returns this process's rows of every batch of a split, each record once.

    Args:
      source: One of `sources`.
      indices: The records to read, in rising order; None: all.
    """
    raise NotImplementedError

  def for_logits(self, source: Split, params: Params) -> Iterable[Batch]:
    """Returns `batches` for a caller that uses only the logits of `predict`.

    If a part of the model is frozen and the run evaluates several times, the
    batches may have activations of that part instead of images. The first call
    computes and caches the activations.

    Args:
      source: One of `sources`.
      params: Parameters of the model.
    """
    return self.batches(source)

  def augmented(
    self, source: Split, indices: np.ndarray, ops: str, seed: int
  ) -> Iterator[Batch]:
    """Returns this process's rows of endless batches, as in training.

    Args:
      source: One of `sources`.
      indices: The records to read, in rising order.
      ops: Preprocessing; random operations are drawn anew in every pass.
      seed: Seed of order and augmentation.
    """
    raise NotImplementedError

  def forward(
    self, fn: Callable, params: Any, batches: Iterable[Batch]
  ) -> Iterator[Any]:
    """Yields the results of a function for each batch, as numpy arrays.

    A batch is dispatched before the results of the previous batch are fetched,
    so that the devices work while the host fetches and decodes.

    Args:
      fn: (params, global batch) -> tree of arrays; a result of `jit`.
      params: First argument of `fn`: parameters, or a tuple of several.
      batches: This process's rows of every batch; a result of `batches`.
    """
    raise NotImplementedError


class Answers(NamedTuple):
  """Predictions of a probe, a classifier learned from features.

  by: Name of the classifier, such as "the vote of the 20 nearest".
  unit: Name of `score`: "probability", "score" or "share of the votes".
  index: Index of the record in the split, int [n].
  label: True class, int [n].
  prediction: Class with the largest score, int [n].
  score: Score of the prediction, float [n].
  of_label: Score of the true class, float [n].
  """

  by: str
  unit: str
  index: np.ndarray
  label: np.ndarray
  prediction: np.ndarray
  score: np.ndarray
  of_label: np.ndarray


class Evaluator:
  """Scores parameters in two phases; training continues during the second.

  Attributes:
    config: Options of the evaluator.
    context: Context of the evaluator.
    note: A line about the data that are scored.
    answers: Predictions of a probe, once scored; None: there are none.
  """

  answers: "Answers | None" = None

  def __init__(self, context: Context):
    self.config = context.options
    self.context = context
    splits = (f"{s.name} [{s.split}]" for s in context.sources.values())
    self.note = ", ".join(splits)

  def few_if_fake(self, source: Split, least: int = 0) -> Split:
    """Returns a split; of fake data, only the records of two batches.

    Args:
      source: A split.
      least: Smallest number of records of fake data, if it has as many.
    """
    if not self.context.config.fake_data:
      return source
    most = max(2 * self.config.batch_size, least)
    most = min(source.num_examples, most)
    return dataclasses.replace(source, num_examples=most)

  def gather(self, params: Params) -> Any:
    """Runs on the devices; returns the argument of `score`. Collective."""
    raise NotImplementedError(type(self).__name__)

  def score(self, gathered: Any) -> dict[str, float]:
    """Returns the scores, computed on the host.

    During training only process 0 calls it, otherwise all processes do.

    Returns:
      "<name of the evaluator>/<metric>" -> value.
    """
    raise NotImplementedError(type(self).__name__)

  def programs(self) -> dict[str, Callable]:
    """Returns name -> function that `Context.jit` made.

    The planner compiles these functions for (params, batch).
    """
    return {}

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """Returns name -> function that one device runs on features.

    The planner compiles these, too, if `programs` has a function "features",
    whose result has the features as "x".

    Args:
      width: Length of a feature.

    Returns:
      Name -> (result of `jax.jit`, its abstract arguments).
    """
    return {}

  def run(self, params: Params) -> dict[str, float]:
    """Returns the scores of the parameters."""
    return self.score(self.gather(params))

  def predictions(
    self, params: Params, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray] | None:
    """Returns images with the model's predictions; None if there are none.

    Args:
      params: Parameters of the model.
      limit: Largest number of first images.
      num_mistakes: Largest number of mistakes.
    """
    return None


def multilabel_error(where: str, source: Split) -> str:
  """Returns the error for data whose images may have several classes."""
  return (
    f"{where}.dataset: got {source.name!r}, whose images may have several"
    " classes, expected one class per image; kind='multilabel' scores the head"
    " on such data."
  )


def no_images_error(name: str, source: Split, what: str) -> str:
  """Returns the error for a split of which no image can be used.

  Args:
    name: Name of the evaluator.
    source: The split.
    what: What no image does, such as "has a label".
  """
  return (
    f"config.evals.{name}: got {source.name!r} [{source.split}], in which no"
    f" image {what}; expected another split."
  )
