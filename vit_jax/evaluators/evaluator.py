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
from vit_jax.options import option

if TYPE_CHECKING:
  import jax

  from vit_jax.families import ModelConfig

Params = dict[str, Any]  # nested, of arrays
Outputs = dict[str, Any]  # a model's intermediates by name, nested


@runtime_checkable
class Split(Protocol):
  """A split of a data set: a `Source`, or what the planner knows of one.

  Attributes:
    name: Name of the data set.
    split: Name of the split, slices included.
    num_examples: Number of records.
    num_classes: Number of classes.
    class_names: Names by label; None if the data set has none.
    is_multilabel: Whether an image has any number of classes.
    is_regression: Whether an image has numbers to predict.
    knows_labels: Whether `labels` takes no reading of the whole split.
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
    """Returns the label of every record, int [n]; -1 for none."""


Splits = Mapping[str, Split]  # option of `SPLITS` -> its split


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
  """What is scored, and when: the options that all evaluators have.

  Class attributes:
    SPLITS: Names of the options that name a split of `dataset`; each split is
      opened once and shared.
    scores_head: Whether the logits are scored, so that a head is needed. The
      first of these evaluators represents the run in its summary.
    scores_numbers: Whether the head's outputs are scored as numbers, and the
      data's labels are such; otherwise as classes.
    LEFT_OUT_BY: An option of the config, and the value with which a run leaves
      this evaluator out if its data set is not on disk; None: never.
  """

  name: str = ""  # the key under evals, and prefix of the metrics
  kind: str = ""  # the key of EVALUATORS
  dataset: str | None = option(
    None, "data set, named as in data.dataset; None: data.dataset"
  )
  split: str = option("test", "split to score")
  ops: str = option("decode|resize(256)|central_crop(224)", "preprocessing")
  batch_size: int | None = option(
    None, "images per batch, all devices; None: data.batch_size"
  )
  every_steps: int = option(0, "steps between evaluations; 0: only at the end")
  group: str | None = option(
    None,
    "group of evaluators, whose mean is written as <group>/<metric>; None: no"
    " group",
  )

  SPLITS: ClassVar[tuple[str, ...]] = ("split",)
  scores_head: ClassVar[bool] = False
  scores_numbers: ClassVar[bool] = False
  LEFT_OUT_BY: ClassVar[tuple[str, str] | None] = None

  def resolved(
    self, dataset: str | None, batch_size: int | None
  ) -> "EvaluatorConfig":
    """Returns the options with those of config.data where they are None."""
    return dataclasses.replace(
      self,
      dataset=self.dataset or dataset,
      batch_size=self.batch_size or batch_size,
    )

  def errors(self, where: str) -> Iterator[str]:
    """Yields the errors that the options alone show, one text each.

    Args:
      where: Path of these options, "config.evals.<name>".
    """
    if self.name == "train" or "/" in self.name:
      yield (
        f"{where}: got the name {self.name!r}, expected one without '/' and"
        " other than 'train', which names the metrics of training."
      )
    if self.batch_size is not None and self.batch_size < 1:
      yield (
        f"{where}.batch_size: got {self.batch_size}, expected 1 or more, or"
        " None for config.data.batch_size."
      )
    if self.every_steps < 0:
      yield (
        f"{where}.every_steps: got {self.every_steps}, expected 0 (only at the"
        " end) or more."
      )

  def kind_errors(
    self, where: str, sources: Splits, head: Head
  ) -> Iterator[str]:
    """Yields an error if data or head have numbers instead of classes.

    For an evaluator of numbers the other way round. The arguments are those of
    `check`, which is called where there is no such error.
    """
    labels = ("classes", "numbers to predict")
    wanted, other = labels[self.scores_numbers], labels[not self.scores_numbers]
    kind = "classification" if self.scores_numbers else "regression"
    for source in sources.values():
      if source.is_regression != self.scores_numbers:
        yield (
          f"{where}.dataset: got {source.name!r}, whose images have {other},"
          f" expected {wanted}; {where}.kind={kind!r} scores these."
        )
    is_regression = head.loss == "regression"
    if self.scores_head and is_regression != self.scores_numbers:
      yield (
        f"{where}.kind: got {self.kind!r}, which scores {wanted}, but the head"
        f" was trained for {other}; {where}.kind={kind!r} scores these."
      )

  def model_errors(self, where: str, model: "ModelConfig") -> Iterator[str]:
    """Yields errors that the options of the model show.

    Args:
      where: Path of these options, "config.evals.<name>".
      model: config.model.
    """
    return iter(())

  def check(
    self, where: str, sources: Splits, head: Head, out: Outputs
  ) -> Iterator[str]:
    """Yields the errors that data and model show, before the run starts.

    Args:
      where: Path of these options, "config.evals.<name>".
      sources: Option of `SPLITS` -> its split. The records of a data set that
        is not prepared yet are fake; its classes and numbers are right.
      head: Classes of the logits.
      out: Intermediates of the model, as shapes for one image.
    """
    return iter(())

  def num_images(self, sources: Splits) -> tuple[int, ...]:
    """Returns the most images of each split that one evaluation computes.

    Args:
      sources: Option of `SPLITS` -> its split, of which only num_examples and
        num_classes are read.
    """
    return tuple(source.num_examples for source in sources.values())

  def make(self, context: "Context") -> "Evaluator":
    """Returns the evaluator of these options."""
    raise NotImplementedError(type(self).__name__)


@runtime_checkable
class RunConfig(Protocol):
  """What evaluators read of a run's `Config`, whose layer is above."""

  model: "ModelConfig"
  objective: Objective
  fake_data: bool


@dataclasses.dataclass(frozen=True)
class Context:
  """What an evaluator gets from its run; see `vit_jax.evaluation`.

  Attributes:
    options: Options of the evaluator; dataset and batch_size are set.
    config: The run.
    sources: Option of `options.SPLITS` -> the split, opened.
    predict: (params, uint8 images) -> (logits, out), not jitted; or, of
      activations that `for_logits` returned, (logits, {}).
    mesh: Mesh of the run.
    random_params: Makes freshly initialised parameters, for baselines.
    head: The classes of the logits.
    workdir: Folder of the run, for files of an evaluator; None: none is
      written.
    shared: What the evaluators of a run share, see `once`.
    on_batch: Called before every batch, by all processes; an exception that it
      raises ends the evaluation.
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

  def once(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns what `make` returned for the first evaluator with this key.

    Evaluators that differ only in their data compile one function this way.
    """
    if key not in self.shared:
      self.shared[key] = make()
    return self.shared[key]

  def jit(self, fn: Callable[[Params, dict], Any]) -> Callable:
    """Returns (params, global batch) -> results, jitted, on every device."""
    raise NotImplementedError

  def labels(self, source: Split) -> np.ndarray:
    """Returns all labels of a split, int32 [n]. Collective.

    Where labels are in the files of the images, each process reads a part.

    Args:
      source: One of `sources`, with one label an image.
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
    """Returns `batches`, of which nothing but `predict`'s logits is used.

    If a part of the model is frozen, and the run evaluates more than once, the
    images may be activations of that part, which the first call keeps.

    Args:
      source: One of `sources`.
      params: Those of the model.
    """
    return self.batches(source)

  def augmented(
    self, source: Split, indices: np.ndarray, ops: str, seed: int
  ) -> Iterator[Batch]:
    """Returns this process's rows of endless batches, as of training.

    Args:
      source: One of `sources`.
      indices: The records that are read, in rising order.
      ops: Preprocessing, drawn anew in every pass.
      seed: Seed of order and augmentation.
    """
    raise NotImplementedError

  def forward(
    self, fn: Callable, params: Params, batches: Iterable[Batch]
  ) -> Iterator[Any]:
    """Yields the results of a function for each batch, as numpy arrays.

    A batch is dispatched before the results of the previous one are fetched, so
    that the devices work while the host fetches and decodes.

    Args:
      fn: (params, global batch) -> tree of arrays, as `jit` returns it.
      params: Its first argument.
      batches: This process's rows of every batch, as `batches` returns them.
    """
    raise NotImplementedError


class Answers(NamedTuple):
  """Predictions of a probe, a classifier learned from features.

  by: The classifier, as a phrase: "the vote of the 20 nearest".
  unit: What `score` is, as a phrase: "probability", "score".
  index: Number of the record, int [n].
  label: True class, int [n].
  prediction: The class with the largest score, int [n].
  score: Its score, float [n].
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
  """Scores parameters in two phases, so that training need not wait.

  Attributes:
    config: Its options.
    context: Its context.
    note: A line on the data that it scores.
    answers: Predictions of a probe after `score`; None: there are none.
  """

  answers: "Answers | None" = None

  def __init__(self, context: Context):
    self.config = context.options
    self.context = context
    splits = (f"{s.name} [{s.split}]" for s in context.sources.values())
    self.note = ", ".join(splits)

  def gather(self, params: Params) -> Any:
    """Runs on the devices; returns what `score` needs. Collective."""
    raise NotImplementedError(type(self).__name__)

  def score(self, gathered: Any) -> dict[str, float]:
    """Runs on the host, in all processes or, when training, in process 0 alone.

    Returns:
      Metrics by name, "<name of the evaluator>/<metric>".
    """
    raise NotImplementedError(type(self).__name__)

  def programs(self) -> dict[str, Callable]:
    """Returns the functions that `Context.jit` made, by name.

    The planner compiles them beforehand, for (params, batch).
    """
    return {}

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """Returns the functions that one device runs on features, by name.

    The planner compiles these, too, if one of `programs` is "features", which
    returns the features as "x".

    Args:
      width: Length of a feature.

    Returns:
      Functions as `jax.jit` made them, each with its abstract arguments.
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
      limit: Most first images.
      num_mistakes: Most mistakes.
    """
    return None


def multilabel_error(where: str, source: Split) -> str:
  """Returns the error for data whose images may have several classes."""
  return (
    f"{where}.dataset: got {source.name!r}, whose images have any number of"
    " classes, expected one class each; kind='multilabel' scores the head on"
    " such data."
  )
