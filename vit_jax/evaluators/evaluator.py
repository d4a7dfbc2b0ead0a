"""The interface of an evaluator: options, checks, context, two phases."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vit_jax.batch import Batch
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
  """What is scored, and when: the options that all evaluators have.

  Class attributes:
    SPLITS: Names of the options that name a split of `dataset`; each is opened
      once for all who read it.
    scores_head: Whether the logits are scored, so that a head is needed. The
      first of these evaluators represents the run in its summary.
    LEFT_OUT_BY: An option of the config, and its value at which the run goes
      without this evaluator if its data set is not on disk; None: never.
  """

  name: str = ""  # the key under evals, and prefix of the metrics
  kind: str = ""  # the key of EVALUATORS
  dataset: str | None = option(None, "as data.dataset; None: the same")
  split: str = option("test", "split to score")
  ops: str = option("decode|resize(256)|central_crop(224)", "preprocessing")
  batch_size: int | None = option(
    None, "images per batch, all devices; None: data.batch_size"
  )
  every_steps: int = option(0, "steps between evaluations; 0: only at the end")
  group: str | None = option(
    None,
    "name under which the mean over all evaluators of that group is written, as"
    " <group>/<metric>; None: none",
  )

  SPLITS: ClassVar[tuple[str, ...]] = ("split",)
  scores_head: ClassVar[bool] = False
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
    """Yields the faults that the options alone show, one text each.

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

  def check(
    self, where: str, sources: Mapping[str, Any], head: Any, out: Any
  ) -> Iterator[str]:
    """Yields the faults that data and model show, before the run starts.

    Args:
      where: Path of these options, "config.evals.<name>".
      sources: Option of `SPLITS` -> its split, a `Source`. For a data set that
        is not prepared yet, records are fake; classes and numbers are right.
      head: `class_names.Head` of the model.
      out: Nested dict of the model's intermediates, shapes of one image.
    """
    return iter(())

  def num_images(self, sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the most images that an evaluation passes through the model.

    Those of each split by themselves: no batch has images of two.

    Args:
      sources: Option of `SPLITS` -> its split, of which num_examples and
        num_classes are read.
    """
    return tuple(source.num_examples for source in sources.values())

  def make(self, context: "Context") -> "Evaluator":
    """Returns the evaluator of these options."""
    raise NotImplementedError(type(self).__name__)


@dataclasses.dataclass(frozen=True)
class Context:
  """What an evaluator gets from its run; see `vit_jax.evaluation`.

  Attributes:
    options: Options of the evaluator; dataset and batch_size are set.
    config: The run.
    sources: Option of `options.SPLITS` -> the split, opened.
    predict: (params, uint8 images) -> (logits, out), not jitted.
    mesh: Mesh of the run.
    random_params: Makes freshly initialised parameters, for baselines.
    head: `class_names.Head`, the classes of the logits.
    workdir: Folder of the run, for files of an evaluator; None: none is
      written.
    made: What the evaluators of a run share, see `once`.
    on_batch: Called before every batch, by all processes alike; may raise,
      which ends the evaluation.
  """

  options: EvaluatorConfig
  config: Any
  sources: Mapping[str, Any]
  predict: Callable[[Any, Any], Any]
  mesh: Any
  random_params: Callable[[], Any]
  head: Any
  workdir: str | None = None
  made: dict[Any, Any] = dataclasses.field(default_factory=dict)
  on_batch: Callable[[], None] = lambda: None

  def once(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns what the run's first evaluator with this key has made.

    So that evaluators which differ only in their data compile one function.
    """
    if key not in self.made:
      self.made[key] = make()
    return self.made[key]

  def jit(self, fn: Callable[[Any, dict], Any]) -> Callable:
    """Returns (params, global batch) -> results, jitted, on every device."""
    raise NotImplementedError

  def labels(self, source: Any) -> np.ndarray:
    """Returns all labels of a split, int32 [n]; in all processes together.

    Where labels are in the files of the images, each process reads a part.

    Args:
      source: One of `sources`, of one label an image.
    """
    raise NotImplementedError

  def batches(
    self, source: Any, indices: np.ndarray | None = None
  ) -> Iterator[Batch]:
    """Returns this process's parts of a split, every record once.

    Args:
      source: One of `sources`.
      indices: The records to read, in rising order; None: all.
    """
    raise NotImplementedError

  def forward(
    self, fn: Callable, params: Any, batches: Iterable[Batch]
  ) -> Iterator[Any]:
    """Yields the results of a function for each batch, as numpy arrays.

    A batch is dispatched to the devices before the host waits for the results
    of the one before, so that they have work while the host fetches and
    decodes.

    Args:
      fn: (params, global batch) -> tree of arrays, as `jit` returns it.
      params: Its first argument.
      batches: The parts that this process reads.
    """
    raise NotImplementedError


class Answers(NamedTuple):
  """What a classifier learned from features says of each image.

  by: Which classifier of those that were scored, in words.
  unit: What `score` is, in words: "probability", "score".
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
    answers: Of a probe, what it said of each image, once it has scored; None:
      it is none, or says nothing of single images.
  """

  answers: "Answers | None" = None

  def __init__(self, context: Context):
    self.config = context.options
    self.context = context
    splits = (f"{s.name} [{s.split}]" for s in context.sources.values())
    self.note = ", ".join(splits)

  def gather(self, params: Any) -> Any:
    """Runs on the devices, in all processes; returns what the host needs."""
    raise NotImplementedError(type(self).__name__)

  def score(self, gathered: Any) -> dict[str, float]:
    """Runs on the host: in training in a thread of process 0, else in all.

    Returns:
      Metrics by name, "<name of the evaluator>/<metric>".
    """
    raise NotImplementedError(type(self).__name__)

  def programs(self) -> dict[str, Callable]:
    """Returns what it runs on the devices, by name, as `Context.jit` made it.

    The planner compiles them beforehand, for (params, batch).
    """
    return {}

  def single_device_programs(
    self, width: int
  ) -> dict[str, tuple[Callable, tuple]]:
    """Returns what a single device runs on features, by name.

    The planner compiles these, too, for one of whose `programs` is "features",
    which returns them as "x".

    Args:
      width: Numbers of a feature.

    Returns:
      Functions as `jax.jit` made them, each with its abstract arguments.
    """
    return {}

  def run(self, params: Any) -> dict[str, float]:
    """Returns the scores of the parameters: both phases in turn."""
    return self.score(self.gather(params))

  def predictions(
    self, params: Any, limit: int, num_mistakes: int
  ) -> dict[str, np.ndarray] | None:
    """Returns images with the model's predictions; None if there are none.

    Args:
      params: Parameters of the model.
      limit: Most first images.
      num_mistakes: Most mistakes.
    """
    return None


def several_classes(where: str, source: Any) -> str:
  """Returns the fault of data whose images may have several classes."""
  return (
    f"{where}.dataset: got {source.name!r}, whose images have any number of"
    " classes, expected one class each; kind='multilabel' scores the head on"
    " such data."
  )
