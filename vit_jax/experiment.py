"""What a run needs: its data, weights, objective, evaluators, resume point.

`run_checks.setup` returns an `Experiment` after checking it. Nothing is opened,
read or derived from the config a second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import batch, missing_data, sharding, weights
from vit_jax.batch import (
  Data,
  DataInfo,
  LabelStatistics,
  RunShape,
  Standardisation,
)
from vit_jax.checkpointing import (
  checkpointer,
  convert_state,
  resume,
  retention,
)
from vit_jax.class_names import Head
from vit_jax.config import HELD_OUT, Config, ConfigError, EvaluatorConfig
from vit_jax.data import sources as sources_lib
from vit_jax.data.preprocessing import image_size
from vit_jax.data.sources import Sources
from vit_jax.eval_context import Evaluators, RunContext, labels_of
from vit_jax.evaluators.evaluator import OtherModel
from vit_jax.inference import pretrained
from vit_jax.inference.pretrained import Pretrained
from vit_jax.models import build
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Learner
from vit_jax.paths import run_path
from vit_jax.step import (
  Params,
  StepObserver,
  Trainer,
  TrainState,
  assemble,
  run_shape_of,
)
from vit_jax.trainable import BASE, TEACHER
from vit_jax.weights.source_file import SourceFile

# Bytes of a split whose labels are read to be counted; from a disk in seconds.
COUNTED_BYTES = 2**31


class Experiment:
  """Data, weights and evaluators of a run; each is made on its first use.

  Args:
    config: The run.
    workdir: Folder of its files. If it has a checkpoint, the run resumes and
      config.init is not read. None to write nothing.
    data: Training data; None to open config.data.
    scored_weights: Weights to score without training; None for a training run.
    sources: Splits that are already open, or None.
    allow_change: Options and sections that may differ from those with which the
      run began, see `checkpointing.resume_rules`.
    on_shrunk: Called for each image that is shrunk.
  """

  def __init__(
    self,
    config: Config,
    workdir: str | None = None,
    data: Data | None = None,
    scored_weights: weights.Weights | None = None,
    sources: Sources | None = None,
    allow_change: Iterable[str] = (),
    on_shrunk: Callable[[], object] = lambda: None,
  ):
    self.config = config
    self.allow_change = tuple(allow_change)
    self.workdir = workdir
    self.scored_weights = scored_weights
    self.is_training = scored_weights is None
    self.sources = sources or Sources.of(config)
    self.given_data = data
    self._fitted: tuple[Params, weights.Report] | None = None
    self.init_metadata: dict[str, Any] = {}  # of config.init, once checked
    # The paper's filter; once config.init is read, the filter of its file.
    self._init_filter = "zoom"
    # Files of parameters, once checked: "init", or "base" of config.lora; and
    # the further models of the objective.
    self.files: dict[str, SourceFile] = {}
    # Further models of objective and evaluators, by address and image size.
    self._models: dict[tuple[str, tuple[int, int] | None], Pretrained] = {}
    self._on_shrunk = on_shrunk
    # Options of the evaluators; data set and batch size may be config.data's.
    self.configured_evals: tuple[EvaluatorConfig, ...] = tuple(
      e.resolved(config.data.dataset, config.data.batch_size)
      for e in config.evals
    )

  @functools.cached_property
  def skipped_evals(self) -> missing_data.Evals:
    """The evaluators that the run leaves out, see config.fewshot."""
    return missing_data.left_out(self.config, self.missing_evals)

  @functools.cached_property
  def evals(self) -> missing_data.Evals:
    """The evaluators that the run has."""
    return tuple(
      e for e in self.configured_evals if e not in self.skipped_evals
    )

  @functools.cached_property
  def missing_evals(self) -> missing_data.Evals:
    """The evaluators whose data are not on this disk."""
    return missing_data.missing(self.configured_evals, self.sources)

  @functools.cached_property
  def data(self) -> Data:
    """The training data; it is prepared and shrunk now if necessary."""
    if self.given_data is not None:
      return self.given_data
    from vit_jax.data.pipeline import TrainingData  # imports TensorFlow

    data = self.config.data
    source = self.sources.open(data.dataset, data.split)
    if self.is_training:
      source = sources_lib.shrunk(source, self.config, self._on_shrunk)
    return TrainingData(source, self.config)

  @property
  def data_name(self) -> str:
    """The name of the data in the summary of the run."""
    if self.given_data is not None:
      return f"{type(self.given_data).__name__}, given"
    data = self.config.data
    fake = ", fake (fake_data)" * self.config.fake_data
    return f"{data.dataset} [{data.split}]{fake}"

  @functools.cached_property
  def data_note(self) -> str:
    """What a user should know before training on the data, or ""."""
    return "" if self.given_data is not None else self.data.source.note()

  @functools.cached_property
  def run_shape(self) -> RunShape:
    """Number of classes, image size and length of the run."""
    if self.scored_weights is not None:
      num_classes = weights.num_classes(
        self.scored_weights.params, self.config.model
      )
      return RunShape(num_classes, image_size(self.config.data.ops))
    data = self.data_info
    shape = run_shape_of(self.config, data.num_classes, data.num_examples)
    names = data.class_names
    return dataclasses.replace(
      shape,
      class_names=tuple(names) if names else None,
      labels=self.read_labels,
    )

  def open_models(
    self, names: Mapping[str, str], size: tuple[int, int] | None = None
  ) -> dict[str, Pretrained]:
    """Returns models by name; each address is read once for a size.

    Args:
      names: Name -> address.
      size: (height, width) of the images; None: as in their training.

    Raises:
      OSError, ValueError: As `vit_jax.load`.
    """
    for path in names.values():
      if (path, size) not in self._models:
        self._models[path, size] = pretrained.load_on_host(
          path, image_size=size
        )
    return {name: self._models[path, size] for name, path in names.items()}

  @property
  def objective_models(self) -> dict[str, Pretrained]:
    """The further models of the objective, by name; see `open_models`."""
    objective = self.config.objective
    size = objective.models_size(self.run_shape.image_size)
    return self.open_models(objective.models(), size)

  @functools.cached_property
  def learner(self) -> Learner:
    """What the objective makes of the model; made once.

    Raises:
      OSError, ValueError: A further model cannot be read; or as `make`.
    """
    config, shape = self.config, self.run_shape
    if not self.is_training:
      num_classes = shape.num_classes * config.objective.trains_head
      return Learner(build(config.model, num_classes), loss=None)
    return config.objective.make(config.model, shape, self.objective_models)

  def trainer(
    self,
    mesh: jax.sharding.Mesh,
    observers: Sequence[StepObserver] = (),
    config: Config | None = None,
  ) -> Trainer:
    """Returns module, optimizer, abstract state and step of the run.

    Args:
      mesh: Mesh of the run.
      observers: See `step.assemble`.
      config: Another form of the run, see `checkpointing.convert_state`; None
        for its own.
    """
    config = config or self.config
    learner = self.learner
    if config.model != self.config.model:
      learner = config.objective.make(
        config.model, self.run_shape, self.objective_models
      )
    return assemble(config, self.run_shape, mesh, observers, learner)

  def _labels(self, whatever_the_cost: bool) -> np.ndarray | None:
    """Returns the labels of the training data; None if unknown. Collective.

    Args:
      whatever_the_cost: Whether to read large files, or to ask a loader that
        was passed to the run, if necessary.
    """
    if self.given_data is not None:
      return self.given_data.labels() if whatever_the_cost else None
    source = self.data.source
    is_cheap = source.knows_labels or (
      source.is_by_number and source.file_bytes <= COUNTED_BYTES
    )
    return labels_of(source) if is_cheap or whatever_the_cost else None

  @functools.cached_property
  def class_counts(self) -> tuple[int, ...] | None:
    """Images of each class in the training data. Collective.

    None for images with several classes or with numbers. Also None if the
    objective does not need the counts, and either a loader was passed to the
    run or the files are large.
    """
    info = self.data_info
    if batch.has_vectors(info):
      return None
    labels = self._labels(self.config.objective.counts_classes)
    if labels is None:
      return None
    counts = np.bincount(labels[labels >= 0], minlength=info.num_classes)
    return tuple(counts.tolist())

  @functools.cached_property
  def standardisation(self) -> Standardisation | None:
    """Mean and deviation of regression targets at the run's start. Collective.

    Raises:
      DataError: A target has the same value in all images.
    """
    if not (self.is_training and self.config.objective.standardises):
      return None
    if saved := self.saved.get("standardisation"):
      return Standardisation(tuple(saved["mean"]), tuple(saved["deviation"]))
    names = self.head.class_names or range(self.run_shape.num_classes)
    return Standardisation.of(
      self._labels(whatever_the_cost=True), [*map(str, names)], self.data_name
    )

  def read_labels(self) -> LabelStatistics:
    """Returns the label statistics that the objective needs. Collective."""
    counts = self.config.objective.counts_classes and self.class_counts or None
    return LabelStatistics(counts, self.standardisation)

  @functools.cached_property
  def head(self) -> Head:
    """The classes of the logits; none if the objective trains no head."""
    if self.is_training and not self.config.objective.trains_head:
      return Head(0, None)
    known = (
      self.data_info if self.scored_weights is None else self.scored_weights
    )
    names = known.class_names
    loss = (
      self.config.objective.head_loss
      if self.scored_weights is None
      else self.scored_weights.loss
    )
    return Head(
      self.run_shape.num_classes,
      tuple(names) if names else None,
      loss or "softmax",
      is_assumed=self.scored_weights is not None and loss is None,
    )

  @functools.cached_property
  def newest(self) -> tuple[int, list[str]]:
    """The step of the newest checkpoint that seems complete, and errors."""
    return retention.start(self._checkpoints) if self.workdir else (0, [])

  @functools.cached_property
  def start(self) -> int:
    """The newest step that seems complete; 0 for a new run.

    If arrays of that step are damaged, the run resumes from an older one.
    """
    return self.newest[0]

  @property
  def _checkpoints(self) -> epath.Path:
    return run_path(self.workdir) / checkpointer.FOLDER

  @functools.cached_property
  def saved(self) -> dict[str, Any]:
    """Metadata of the checkpoint of `start`; {} for a new run."""
    if not self.start:
      return {}
    return checkpointer.load_metadata(str(self._checkpoints / str(self.start)))

  @property
  def posemb_filter(self) -> str:
    """How positions are resized, a name of `models.resample.METHODS`.

    It is the filter of the weights that the run began with, or to score; the
    paper's for a run from scratch.
    """
    began = self.saved if self.is_training else {}
    return began.get("posemb_filter") or self._init_filter

  @functools.cached_property
  def resumed(self) -> resume.Resumed | None:
    """The run that is resumed, and its changes; None for a new run."""
    if not self.start:
      return None
    return resume.Resumed(
      self.workdir,
      self.config,
      self.allow_change,
      self.start,
      self.saved,
    )

  @functools.cached_property
  def shapes(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the model's intermediates for one image, and of its params."""
    module = self.learner.module
    size = self.run_shape.image_size
    shape = (1, *size, self.config.model.channels)
    images = jax.ShapeDtypeStruct(shape, "float32")
    (_, out), variables = jax.eval_shape(
      lambda images: module.init_with_output(jax.random.key(0), images), images
    )
    try:
      return out, only_params(variables)
    except ValueError as e:
      raise ConfigError([str(e)]) from None

  def read_weights(self) -> weights.Weights:
    """Returns the weights of config.init, or to score.

    Every process reads them. If several processes share a host, the first reads
    the disk and the others the page cache (ViT-B/16, measured on two CPU cores:
    346 MB, then 0). One of them downloads weights that have an address.

    Raises:
      OSError, ValueError: As `weights.read`.
    """
    read = self.scored_weights
    if read is None:
      path, mean = self.config.init, self.config.init_mean
      heads = getattr(self.config.model, "num_heads", None)
      options = {} if heads is None else {"num_heads": heads}
      try:
        read = weights.read(path, mean=mean)
      except ValueError:  # perhaps only the number of heads is unknown
        if not options:
          raise
        read = weights.read(path, mean=mean, options=options)
      if read.assumes_heads and options:
        read = weights.read(path, mean=mean, options=options)
    self.init_metadata = dict(read.metadata)
    self._init_filter = read.posemb_filter
    return read

  def fit_weights(self, read: weights.Weights) -> weights.Report:
    """Fits weights to the model; returns what was loaded and changed.

    Args:
      read: The result of `read_weights`.

    Raises:
      OSError, ValueError: As `weights.adapt`.
    """
    objective = self.config.objective
    if self.is_training and "regression" in (read.loss, objective.head_loss):
      read = weights.without_head(read, self.config.model)
    self._fitted = weights.adapt(
      read,
      self.shapes[1],
      self.config.model,
      self.run_shape.image_size,
      class_names=self.head.class_names if self.is_training else None,
      posemb_filter=self.posemb_filter,
      own=objective.own,
    )
    return self._fitted[1]

  @property
  def fitted_params(self) -> Params:
    """The parameters that `fitted_weights` will return; {} without them."""
    return self._fitted[0] if self._fitted else {}

  def fitted_weights(self) -> tuple[Params, weights.Report]:
    """Returns the weights of config.init, or to score, fitted to the model.

    Call it once: it keeps no reference, so that the host can free them.
    """
    fitted, self._fitted = self._fitted, None
    return fitted

  def form_of(self, trainer: Trainer) -> checkpointer.FormOf:
    """Returns what finds the form of a checkpoint's state, to resume from it.

    Args:
      trainer: The run's.
    """
    mesh = trainer.state.step.sharding.mesh
    return convert_state.form_of(
      self.config,
      trainer,
      lambda config: self.trainer(mesh, trainer.observers, config),
    )

  @property
  def init_report(self) -> str:
    """What was loaded of the weights of config.init; "" without them."""
    return weights.format_report(self._fitted[1]) if self._fitted else ""

  def with_weights(self, state: TrainState, like: TrainState) -> TrainState:
    """Returns a state with all parameters that are read from files.

    These are the weights of config.init for a state at step 0, and those that
    no checkpoint has, see `TrainState.fixed`.

    Args:
      state: A state, new or of a checkpoint.
      like: The abstract state of the run.
    """
    params = self.fitted_weights()[0] if self._fitted else None
    if params is not None and not self.start:
      state = state.with_params(params)
    elif params is not None:  # a checkpoint has the adapters and the head alone
      state = state.with_fixed(BASE, params, like)
    if self.learner.frozen is not None:
      params = self.learner.frozen.model.params
      state = state.with_fixed(TEACHER, params, like)
    return state

  def evaluators(
    self,
    trainer: Trainer,
    mesh: jax.sharding.Mesh,
    on_batch: Callable[[], None] = lambda: None,
    cached_part: Callable[[EvaluatorConfig], Callable | None] = lambda e: None,
  ) -> Evaluators:
    """Returns the evaluators in the order of the config; prepares their data.

    Args:
      trainer: The model to score.
      mesh: Mesh of the run.
      on_batch: See `Context.on_batch`.
      cached_part: Options of an evaluator -> see `RunContext.cached_part`.
    """
    shared: dict[Any, Any] = {}
    head = self.head._replace(standardisation=self.standardisation)
    return Evaluators(
      [
        e.make(
          RunContext(
            options=e,
            config=self.config,
            sources={
              option: self.sources.open(e.dataset, getattr(e, option))
              for option in e.SPLITS
            },
            predict=trainer.predict,
            mesh=mesh,
            random_params=trainer.init_params,
            head=head,
            workdir=self.workdir,
            shared=shared,
            on_batch=on_batch,
            models={
              name: _on_mesh(model, mesh)
              for name, model in self.open_models(
                e.models(), image_size(e.ops)
              ).items()
            },
            cached_part=cached_part(e),
          )
        )
        for e in self.evals
      ],
      self.run_shape.total_steps,
      # The images that chose the penalty of a linear probe.
      HELD_OUT if self.config.init_head == "linear_probe" else None,
    )

  @property
  def data_info(self) -> DataInfo:
    """The training data or their source, for sizes and class names.

    No data set is generated.
    """
    if self.given_data is not None:
      return self.given_data
    data = self.config.data
    return self.sources.inspect(data.dataset, data.split)


def _on_mesh(model: Pretrained, mesh: jax.sharding.Mesh) -> OtherModel:
  """Returns a model of an evaluator, with its parameters on the devices."""

  def predict(params, images):
    return model.model.apply({"params": params}, batch.normalise(images))

  shardings = sharding.infer(model.params, mesh, model.config)
  return OtherModel(jax.device_put(model.params, shardings), predict)
