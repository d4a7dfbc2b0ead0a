"""The interface of objectives: options, checks, and what the step learns."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import (
  TYPE_CHECKING,
  Any,
  ClassVar,
  NamedTuple,
  Protocol,
  runtime_checkable,
)

from vit_jax.batch import DataInfo, RunShape, View
from vit_jax.families import ModelConfig

if TYPE_CHECKING:
  import flax.linen
  import jax


@runtime_checkable
class LoadedModel(Protocol):
  """A model that `vit_jax.load` has read, a `Pretrained`.

  Attributes:
    config: Options of the model.
    params: Parameters, a nested dict of float32 arrays. `Objective.make` gets
      numpy arrays; the planner may pass `jax.ShapeDtypeStruct`.
    num_classes: Number of outputs of the head; 0: there is no head.
    image_size: (height, width) of the images, pixels.
    model: The linen module; it maps images in [-1, 1] to (logits, out).
  """

  config: ModelConfig
  params: dict[str, Any]
  num_classes: int
  image_size: tuple[int, int]

  @property
  def model(self) -> "flax.linen.Module": ...


class Average(NamedTuple):
  """A teacher that is a running mean of the trained parameters.

  teacher <- momentum teacher + (1 - momentum) parameters, after each update.
  It starts as the initial parameters.

  momentum: 0 to 1; or a function of the number of steps taken, int32.
  is_published: Whether the running mean is what evaluators score, what a
    checkpoint has as `params` and what `vit_jax.load` reads. It then takes the
    place of config.optim.ema_decay.
  """

  momentum: "float | Callable[[jax.Array], jax.Array]"
  is_published: bool = False

  def at(self, step: "jax.Array") -> "float | jax.Array":
    """Returns the momentum of an update, given the updates before it."""
    return self.momentum(step) if callable(self.momentum) else self.momentum


class Frozen(NamedTuple):
  """A teacher that does not change: one of `Objective.models`.

  Its parameters are an argument of the step, sharded like a model of its
  family. Checkpoints have its address and digest instead of its parameters.

  model: What `make` got under the name of the model.
  """

  model: LoadedModel


class Targets(NamedTuple):
  """What `Learner.targets` returns; all parts are optional.

  rows: Arrays with a row for each row of the device. The loss gets those of its
    rows as batch["targets"].
  shared: Arrays that the loss gets as batch["shared"] for every row, such as
    the vectors of all rows of the batch.
  memory: New values of `Learner.memory`; every device must compute the same.
  """

  rows: Any = None
  shared: Any = None
  memory: Any = None


class Pictures(NamedTuple):
  """What `vit-jax visualize` shows of an objective's own parameters.

  title: Heading.
  text: What the parts of a row are.
  rows: A row of pictures for each image, uint8 [b, parts, h, w, 3].
  """

  title: str
  text: str
  rows: Any


@dataclasses.dataclass(frozen=True)
class Learner:
  """What an objective makes of a model: everything that a step needs.

  Attributes:
    module: A `flax.linen.Module`. It maps images [b, h, w, c] in [-1, 1] to
      (logits, out), as every model does. Its `init` on such images makes all
      parameters.
    loss: (params, batch, rng, step) -> (sum, count, named). `sum` is the loss
      summed over the valid items of a batch, `count` their number, `named`
      further pairs (sum, count) by name, which are logged as means; all are
      float32 scalars. The step adds them up over microbatches and devices, and
      divides. So the loss of a row must not depend on other rows, unless
      `Objective.paired` or `targets` adds them to it. Random numbers must
      follow from `rng`, the key of the step, and from the record's number
      batch["index"], not from the position of the row. `step` is the number of
      updates applied, int32. Only the module may read `params`: those of
      scanned blocks are one device's parts (`models.stacking.Part`), which the
      scan's body gathers.
    teacher: Whose parameters `targets` gets: a running mean, or a frozen model;
      or both, as a pair. None: those of the trained model.
    targets: (teacher's params, batch, rng, step, memory, over) -> `Targets`.
      A pair of teachers gives a pair of params.
      Called once a step, without a gradient, with all rows of a device. `over`
      computes over the rows of all devices, see `collectives.Over`.
    memory: First values of the arrays that `targets` keeps from step to step:
      a nested dict of numpy arrays. Every device has all of them.
    init: (params, rng) -> params: changes the module's initial parameters.
    train_flops: FLOPs of an image's training step, by the rule of
      `ModelConfig.train_flops`; None for those of the model.
    whole_batch: Whether the loss needs other rows with a gradient. It then gets
      `over` as fifth argument and all rows of a device at once, and
      config.optim.microbatch is refused.
  """

  module: "flax.linen.Module"
  loss: Callable[..., tuple[Any, Any, dict[str, tuple[Any, Any]]]] | None
  teacher: Average | Frozen | tuple[Average, Frozen] | None = None
  targets: Callable[..., Targets] | None = None
  memory: Mapping[str, Any] | None = None
  init: Callable[[Any, Any], Any] | None = None
  train_flops: int | float | None = None
  whole_batch: bool = False

  @property
  def average(self) -> Average | None:
    """The teacher that is a running mean."""
    return self._teacher(Average)

  @property
  def frozen(self) -> Frozen | None:
    """The teacher that does not change."""
    return self._teacher(Frozen)

  def _teacher(self, kind: type):
    is_pair = type(self.teacher) is tuple
    teachers = self.teacher if is_pair else (self.teacher,)
    return next((t for t in teachers if isinstance(t, kind)), None)

  def flops(self, model: ModelConfig, run_shape: RunShape) -> int | float:
    """Returns `train_flops`, those of the model if the objective has none."""
    if self.train_flops is not None:
      return self.train_flops
    return model.train_flops(run_shape.image_size, run_shape.num_classes)


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is learned: options of all objectives, and their interface.

  Class attributes:
    trains_head: Whether the logits are those of the data's classes. If not,
      evaluators that score logits are an error, and the checkpoint has no head.
    standardises: Whether the loss needs `run_shape.labels().standardisation`.
    own: Start of the paths of the objective's own parameters, such as
      "masked_patch/", or None. `config.init` and `vit_jax.load` leave them out
      for models without this objective.
    compares_images: Whether an image is compared with the others of its batch.
      Fewer images than a batch, whose copies would be compared, are an error.
    follows_length: Whether the objective reads `run_shape.total_steps`. Another
      length is then another run.
    SHARDING: Rules for the objective's own parameters, in the form of
      `ModelConfig.SHARDING`.
  """

  kind: str = ""  # the key of OBJECTIVES, or the import path

  trains_head: ClassVar[bool] = True
  standardises: ClassVar[bool] = False
  own: ClassVar[str | None] = None
  compares_images: ClassVar[bool] = False
  follows_length: ClassVar[bool] = False
  SHARDING: ClassVar[tuple[tuple[str, tuple], ...]] = ()

  @property
  def head_loss(self) -> str | None:
    """The head's loss, one of `losses.HEADS`; None if no head is trained.

    It says what the logits mean to evaluators and to `vit_jax.load`.
    """
    return None

  @property
  def reads_labels(self) -> bool:
    """Whether it cannot learn from images without classes."""
    return self.trains_head

  @property
  def counts_classes(self) -> bool:
    """Whether the loss needs `run_shape.labels().class_counts`."""
    return False

  @property
  def passes_images(self) -> bool:
    """Whether `make` returns the model itself, applied to unchanged images.

    The activations of a frozen part are then the same in every step.
    """
    return False

  def errors(self) -> Iterator[str]:
    """Yields the errors that the options alone show, one text each."""
    return iter(())

  def model_errors(
    self, model: ModelConfig, image_size: tuple[int, int]
  ) -> Iterator[str]:
    """Yields why the objective cannot train a model on images of this size.

    Args:
      model: `config.model`, without errors of its own.
      image_size: (height, width) in pixels, which fit the model.
    """
    return iter(())

  def start_errors(self, model: ModelConfig) -> Iterator[str]:
    """Yields why no new run may train a model; a resumed run may."""
    return iter(())

  def data_errors(self, data: DataInfo) -> Iterator[str]:
    """Yields why the objective cannot learn from data."""
    return iter(())

  def models(self) -> dict[str, str]:
    """Returns name -> weights of the further models that `make` needs.

    The weights are anything that `vit_jax.load` reads. Each is read once.
    """
    return {}

  def models_size(self, image_size: tuple[int, int]) -> tuple[int, int] | None:
    """Returns (height, width) of the images of `models`, to resize positions.

    Args:
      image_size: (height, width) of the images of config.data.ops, pixels.

    Returns:
      The size; None: that of their training.
    """
    return None

  def make_errors(
    self,
    model: ModelConfig,
    run_shape: RunShape,
    models: Mapping[str, LoadedModel],
  ) -> Iterator[str]:
    """Yields why `make` cannot work with these arguments, one text each."""
    return iter(())

  def num_tokens(
    self, model: ModelConfig, image_size: tuple[int, int]
  ) -> int | None:
    """Returns how many tokens of a record the model's blocks learn from.

    It decides how many records a chip computes at once. None: unknown.

    Args:
      model: `config.model`.
      image_size: (height, width) of the images of config.data.ops, pixels.
    """
    return model.num_tokens(image_size)

  def views(self, ops: str) -> dict[str, View]:
    """Returns what a batch has of each record, by its key in the batch.

    A record is decoded once for all its crops.

    Args:
      ops: config.data.ops, which also decide the size of the model's images.
    """
    return {"image": View(ops)}

  def paired(self, batch: dict) -> dict:
    """Returns a global batch, possibly with arrays of other rows for each row.

    The step calls it before it divides rows over devices and microbatches, so
    that `Learner.loss` needs no other row.
    """
    return batch

  def make(
    self,
    model: ModelConfig,
    run_shape: RunShape,
    models: Mapping[str, LoadedModel],
  ) -> Learner:
    """Returns what the step needs. Called once, before the first step.

    Args:
      model: `config.model`.
      run_shape: The sizes of the run. The loss may call `run_shape.labels`;
        `make` may not, because the data may not be prepared yet.
      models: The opened models of `models`, by their names.
    """
    raise NotImplementedError(type(self).__name__)

  def pictures(
    self, model: ModelConfig, params: dict[str, Any], images: Any
  ) -> Pictures | None:
    """Returns what a checkpoint makes of images; None for nothing to see.

    Args:
      model: `config.model`, for inference.
      params: All parameters of the checkpoint, the objective's own included;
        blocks are not stacked.
      images: Preprocessed images, uint8 [b, h, w, c].
    """
    return None
