"""Opens, counts, reads and checks all that a run needs, before its first step.

`setup` raises all errors at once, before anything is compiled or a data set is
prepared. It returns the `Experiment`: nothing is opened, read or derived from
the config a second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict

from vit_jax import batch, missing_data, optim, sharding, step_checks, weights
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
  resume_rules,
  retention,
)
from vit_jax.class_names import Head
from vit_jax.config import HELD_OUT, Config, ConfigError, EvaluatorConfig
from vit_jax.config.checks import option_errors, size_errors, warmup_errors
from vit_jax.data.pipeline import TrainingData
from vit_jax.data.preprocessing import image_size
from vit_jax.data.sources import Sources
from vit_jax.distributed import agreement
from vit_jax.evaluation import Evaluators, RunContext, labels_of
from vit_jax.evaluators.evaluator import OtherModel
from vit_jax.finetune import adapters, lora
from vit_jax.finetune.data import shrunk
from vit_jax.finetune.frozen import FrozenPart
from vit_jax.inference import pretrained
from vit_jax.inference.pretrained import Pretrained
from vit_jax.models import build
from vit_jax.models.variables import only_params
from vit_jax.objectives.objective import Frozen, Learner
from vit_jax.paths import run_path
from vit_jax.step import (
  Params,
  StepObserver,
  Trainer,
  TrainState,
  assemble,
  run_shape_of,
)
from vit_jax.trainable import BASE, TEACHER, Trainable
from vit_jax.writers import atomic_files, trackers
from vit_jax.writers.metric_writer import METRICS, SCORES

# Bytes of a split whose labels are read to be counted; from a disk in seconds.
COUNTED_BYTES = 2**31


class Experiment:
  """Data, weights and evaluators of a run; each is made on its first use.

  Args:
    config: The run.
    workdir: Folder of its files. If it has a checkpoint, the run resumes and
      config.init is not read. None to write nothing.
    data: Training data; None for those of config.data.
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
    self._init_filter = "zoom"  # the paper's; that of config.init, once checked
    # Files of the parameters that checkpoints do not have, once checked: "base"
    # of config.lora, and the further models of the objective.
    self.files: dict[str, adapters.Base] = {}
    # Further models of objective and evaluators, by address and image size.
    self._models: dict[tuple[str, tuple[int, int] | None], Pretrained] = {}
    self._on_shrunk = on_shrunk
    # Options of the evaluators; data set and batch size may be config.data's.
    self._configured: tuple[EvaluatorConfig, ...] = tuple(
      e.resolved(config.data.dataset, config.data.batch_size)
      for e in config.evals
    )

  @functools.cached_property
  def skipped_evals(self) -> missing_data.Evals:
    """The evaluators that the run leaves out, see config.fewshot."""
    return missing_data.left_out(self.config, self._missing)

  @functools.cached_property
  def evals(self) -> missing_data.Evals:
    """The evaluators that the run has."""
    return tuple(e for e in self._configured if e not in self.skipped_evals)

  @functools.cached_property
  def _missing(self) -> missing_data.Evals:
    return missing_data.missing(self._configured, self.sources)

  @functools.cached_property
  def data(self) -> Data:
    """The training data; it is prepared and shrunk now if necessary."""
    if self.given_data is not None:
      return self.given_data
    data = self.config.data
    source = self.sources.open(data.dataset, data.split)
    if self.is_training:
      source = shrunk.shrunk(source, data.shrink, data.ops, self._on_shrunk)
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
    return dataclasses.replace(shape, labels=self.read_labels)

  def _open(
    self, names: Mapping[str, str], size: tuple[int, int] | None = None
  ) -> dict[str, Pretrained]:
    """Returns models by name; each address is read once for a size.

    Args:
      names: Name -> address.
      size: (height, width) of the images; None: that of their training.

    Raises:
      OSError, ValueError: As `vit_jax.load`.
    """
    for path in names.values():
      if (path, size) not in self._models:
        self._models[path, size] = pretrained.load(
          path, image_size=size, verbose=False
        )
    return {name: self._models[path, size] for name, path in names.items()}

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
    return config.objective.make(
      config.model, shape, self._open(config.objective.models())
    )

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
      models = self._open(config.objective.models())
      learner = config.objective.make(config.model, self.run_shape, models)
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
    if saved := self.resumed_metadata.get("standardisation"):
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
  def is_new(self) -> bool:
    """Whether a training run starts at step 0; False for scoring."""
    return self.is_training and not self.start

  @property
  def _checkpoints(self) -> epath.Path:
    return run_path(self.workdir) / checkpointer.FOLDER

  @functools.cached_property
  def resumed_metadata(self) -> dict[str, Any]:
    """Metadata of the checkpoint of `start`; {} for a new run."""
    if not self.start:
      return {}
    return checkpointer.load_metadata(str(self._checkpoints / str(self.start)))

  @property
  def posemb_filter(self) -> str:
    """How positions are resized, a name of `models.resample.METHODS`.

    It is that of the weights that the run began with, or to score; from
    scratch, the paper's.
    """
    began = self.resumed_metadata if self.is_training else {}
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
      self.resumed_metadata,
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
      state = weights.replace_params(state, params)
    elif params is not None:  # a checkpoint has the adapters and the head alone
      state = weights.with_fixed(state, BASE, params, like)
    if isinstance(self.learner.teacher, Frozen):
      params = self.learner.teacher.model.params
      state = weights.with_fixed(state, TEACHER, params, like)
    return state

  def evaluators(
    self,
    trainer: Trainer,
    mesh: jax.sharding.Mesh,
    on_batch: Callable[[], None] = lambda: None,
    cached_part: Callable[[EvaluatorConfig], FrozenPart | None] = (
      lambda e: None
    ),
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
              for name, model in self._open(
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

  def check(self, errors: Iterable[str] = ()) -> None:
    """Raises if options, machine or disk show that the run cannot work.

    Args:
      errors: Errors of the command line, raised with those of the run.

    Raises:
      ConfigError: All errors.
    """
    config = self.config
    sizes = size_errors(config, self.is_training)
    data = self.data_errors()
    absent = {e.name for e in self._missing}
    every = [
      *errors,
      *sizes,
      *option_errors(config, self.is_training, self.is_new),
      *mesh_errors(config),
      *(trackers.errors(config) if self.is_training else ()),
      *(e for k, part in data.items() if k not in absent for e in part),
      *missing_data.advice(config, self._missing),
    ]
    # What follows needs the shapes of model and data.
    is_known = not sizes and not data[""]
    if is_known and self.is_training:
      every += self.length_and_head_errors() + self._resume_errors()
    if is_known:
      unmade = self._learner_errors(is_first=not every)
      is_known = not unmade
      every += unmade
    if is_known and self.is_training:
      if not any(error.startswith("config.optim.") for error in every):
        every += self._parameter_errors()
    for e in self.evals if is_known else ():
      where = f"config.evals.{e.name}"
      has_errors = any(error.startswith(where) for error in every)
      if not has_errors and not data[e.name]:
        every += self._evaluator_errors(e, where)
    every += self._weights_errors(is_known)
    if self.workdir is not None and not every:
      every = workdir_errors(self.workdir, self.is_training)
    if every:
      raise ConfigError(dict.fromkeys(every))
    missing_data.agree(
      config.data.data_dir,
      {
        e.dataset: e not in self.skipped_evals
        for e in self._configured
        if e.LEFT_OUT_BY
      },
    )
    if jax.process_count() > 1:
      self._agree()

  def _learner_errors(self, is_first: bool) -> list[str]:
    """Returns why the objective cannot make what the step needs.

    Args:
      is_first: Whether there is no other error, which may be the reason.
    """
    objective, model = self.config.objective, self.config.model
    where = "config.objective"
    try:
      if self.is_training:
        models = self._open(objective.models())
        shape = self.run_shape
        if errors := list(objective.make_errors(model, shape, models)):
          return errors
        for name, path in objective.models().items():
          self.files[name] = adapters.base_of_model(path, models[name].params)
        began = self.resumed_metadata.get("models", {})
        changed = [
          f"{where}: {error}"
          for name in objective.models().keys() & began.keys()
          if (
            error := adapters.difference(
              self.files[name], began[name]["digest"]
            )
          )
        ]
        if changed:
          return changed
      learner, _ = self.learner, self.shapes
      if not (self.is_training and is_first):
        return []
      outputs = (self.run_shape.num_classes,)
      label = outputs if batch.has_vectors(self.data_info) else ()
      return step_checks.errors(self.config, self.run_shape, learner, label)
    except Exception as e:
      if isinstance(e, OSError | ValueError):
        return [str(e) if str(e).startswith("config.") else f"{where}: {e}"]
      if is_first:  # otherwise another error is the reason
        raise
      return []

  def _parameter_errors(self) -> list[str]:
    """Returns errors of options that name parameters or linear maps."""
    model, own = self.config.model, self.config.objective.own
    names = flatten_dict(self.shapes[1], sep="/")
    for option, is_one, is_needed in (
      ("HEADS", model.is_head, self.config.objective.trains_head),
      ("BLOCKS", lambda k: model.block_of(k) is not None, model.BLOCKS),
    ):
      if is_needed and not any(map(is_one, names)):
        return [
          f"config.model.name: got {model.name!r}, whose {option}"
          f" {getattr(model, option)!r} match none of its parameters, such as"
          f" {next(reversed(names))}."
        ]
    if self.config.init_head != "zeros" and not any(map(model.is_head, names)):
      return [
        f"config.init_head: got {self.config.init_head!r}, expected 'zeros': no"
        " parameter is the head's"
        f" ({type(model).__name__}.HEADS: {model.HEADS!r})."
      ]
    config = dataclasses.replace(
      self.config, optim=dataclasses.replace(self.config.optim, freeze=())
    )
    try:
      params, _ = jax.eval_shape(
        Trainable(config).split, self.shapes[1], jax.random.key(0)
      )
    except ValueError as e:
      return [str(e)]
    return optim.errors(self.config.optim, params, model, own)

  def data_errors(self) -> dict[str, list[str]]:
    """Returns errors of missing splits; prepares no data set.

    Returns:
      Errors of the training data under "", of an evaluator under its name.
    """
    errors = {e.name: self._evaluator_data_errors(e) for e in self.evals}
    return {"": self._training_data_errors(), **errors}

  def _training_data_errors(self) -> list[str]:
    """Returns errors of the training split, or of data passed to the run."""
    if self.given_data is not None:
      return given_data_errors(self.given_data)
    if not self.is_training:
      return []
    data = self.config.data
    return self.sources.errors(
      data.dataset, data.split, "config.data.dataset", "config.data.split"
    )

  def _evaluator_data_errors(self, e: EvaluatorConfig) -> list[str]:
    """Returns an error for each missing split of an evaluator."""
    (written,) = (w for w in self.config.evals if w.name == e.name)
    where = f"config.evals.{e.name}"
    at = "config.data" if written.dataset is None else where
    return [
      error
      for option in e.SPLITS
      for error in self.sources.errors(
        e.dataset, getattr(e, option), f"{at}.dataset", f"{where}.{option}"
      )
    ]

  def length_and_head_errors(self) -> list[str]:
    """Returns errors of the run's length and of the head, given the data."""
    errors, info = [], self.data_info
    if self.config.total_steps is None:
      errors += warmup_errors(self.config, self.run_shape.total_steps)
    repeats = self.config.data.repeats
    if repeats > 1 and not getattr(info, "is_by_number", True):
      errors.append(
        f"config.data.repeats: got {repeats}, but records of {info.name!r} are"
        " streamed from files, so copies of an image would not be in one batch;"
        " expected 1, or files of format array_record, as vit-jax prepare"
        " writes them."
      )
    name = getattr(info, "name", type(info).__name__)
    if self.run_shape.num_classes < info.num_classes:
      errors.append(
        f"config.num_classes: got {self.run_shape.num_classes}, expected at"
        f" least the {info.num_classes} classes of {name!r}, or None."
      )
    if (
      batch.has_vectors(info) and self.run_shape.num_classes > info.num_classes
    ):
      errors.append(
        f"config.num_classes: got {self.run_shape.num_classes}, expected"
        f" {info.num_classes}, the width of the labels, or None."
      )
    is_multilabel = getattr(info, "is_multilabel", False)
    if self.config.init_head == "linear_probe" and is_multilabel:
      errors.append(
        "config.init_head: got 'linear_probe', which needs one class per image,"
        f" but an image of {name!r} can have several; expected 'zeros'."
      )
    return [*errors, *self.config.objective.data_errors(info)]

  def _resume_errors(self) -> list[str]:
    """Returns errors of --allow_change, and of changes that are not allowed."""
    resumed = self.resumed
    old = resumed.old_config.values if resumed else {}
    errors = resume_rules.flag_errors(self.allow_change, self.config, old)
    if resumed is None:
      return errors + self.newest[1]
    return errors + resumed.errors(
      self.run_shape, self.data_info, self.head.class_names
    )

  def _evaluator_errors(self, e: EvaluatorConfig, where: str) -> list[str]:
    """Returns errors of an evaluator, given head, layers and its data."""
    if e.scores_head and not self.head.num_classes:
      if self.scored_weights is None:
        return []  # `option_errors` reports it
      return [
        f"--checkpoint: got {self.scored_weights.path!r}, which has no head;"
        " expected one, or --fewshot=<dataset>."
      ]
    try:
      self._open(e.models(), image_size(e.ops))
    except (OSError, ValueError) as error:
      return [f"{where}: {error}"]
    splits = {
      option: self.sources.inspect(e.dataset, getattr(e, option))
      for option in e.SPLITS
    }
    errors = list(e.kind_errors(where, splits, self.head))
    errors += e.model_errors(where, self.config.model)
    return errors or list(e.check(where, splits, self.head, self.shapes[0]))

  def _weights_errors(self, are_shapes_known: bool) -> list[str]:
    """Returns errors of the weights to start from, or to score.

    Every process reads them. If several processes share a host, the first reads
    the disk and the others the page cache (ViT-B/16, measured on two CPU cores:
    346 MB, then 0). One of them downloads weights that have an address.

    Args:
      are_shapes_known: Whether the weights can be fitted to the model.
    """
    adapts = self.is_training and bool(self.config.lora.rank)
    if adapts and not self.config.init and self.workdir is not None:
      return [
        "config.init: got None beside config.lora.rank="
        f"{self.config.lora.rank}, expected the weights to adapt, which"
        " checkpoints do not have."
      ]
    if self.is_training and not self.config.init:
      return []
    if self.is_training and self.start and not adapts:
      return []
    key = "config.init" if self.is_training else "--checkpoint"
    try:
      read = self.scored_weights or weights.read(
        self.config.init, mean=self.config.init_mean
      )
      self.init_metadata = dict(read.metadata)
      self._init_filter = read.posemb_filter
      if adapts:
        base = adapters.base_of(read, self.config.init_mean)
        self.files[BASE] = base
        began = self.resumed_metadata.get(BASE, base._asdict())
        if error := adapters.difference(base, began["digest"]):
          return [f"{key}: {error}"]
      if not are_shapes_known:
        return []
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
    except (OSError, ValueError) as e:
      hint = ""
      if not (self.is_training or self.config.init):
        hint = (
          "\nIf the config takes init=PATH (folder, finetune), add"
          f" init={read.path} to it: then model and image size are those of the"
          " weights."
        )
      return [f"{key}: {e}{hint}"]
    new = self._fitted[1].reinitialised
    own = self.config.objective.own
    model = self.config.model
    if frozen := [
      k for k in new if adapts and not lora.is_trained(k, model, own)
    ]:
      return [
        f"{key}: got no {', '.join(frozen)}, which config.lora would leave at"
        " random; expected weights that have it, or a model without."
      ]
    if new and not self.is_training:
      return [
        f"{key}: got a head other than {', '.join(new)}; set"
        " config.model.pre_logits as it was trained."
      ]
    return []

  def _agree(self) -> None:
    """Checks that all processes have the same run; see `agreement`."""
    data = (
      {"the data given": self.given_data} if self.given_data is not None else {}
    )
    if self.is_training and not data:
      data["config.data"] = self.data_info
    for e in self.evals:
      for option in e.SPLITS:
        data[f"config.evals.{e.name}.{option}"] = self.sources.inspect(
          e.dataset, getattr(e, option)
        )
    fitted = self._fitted[0] if self._fitted else {}
    agreement.check(agreement.of_run(self.config, data, fitted))
    if self.is_training and self.workdir is not None:
      agreement.check_folder(self.workdir)


def setup(
  config: Config,
  workdir: str | None = None,
  data: Data | None = None,
  *,
  scored_weights: weights.Weights | None = None,
  sources: Sources | None = None,
  allow_change: Iterable[str] = (),
  on_shrunk: Callable[[], object] = lambda: None,
  errors: Iterable[str] = (),
) -> Experiment:
  """Returns the `Experiment` of these arguments, after checking it.

  Args:
    config: See `Experiment`, also for the other arguments.
    errors: Errors of the command line, raised together with those of the run.

  Raises:
    ConfigError: All errors at once.
  """
  experiment = Experiment(
    config, workdir, data, scored_weights, sources, allow_change, on_shrunk
  )
  experiment.check(errors)
  if experiment.is_training:  # collective, and the step is traced in a thread
    experiment.read_labels()
  return experiment


def _on_mesh(model: Pretrained, mesh: jax.sharding.Mesh) -> OtherModel:
  """Returns a model of an evaluator, with its parameters on the devices."""

  def predict(params, images):
    return model.model.apply({"params": params}, batch.normalise(images))

  shardings = sharding.infer(model.params, mesh, model.config)
  return OtherModel(jax.device_put(model.params, shardings), predict)


def workdir_errors(workdir: str, is_training: bool) -> list[str]:
  """Makes the folder; returns an error if it cannot be written to."""
  folder = run_path(workdir)
  try:
    with atomic_files.os_errors(folder):
      folder.mkdir(parents=True, exist_ok=True)
      with (folder / (METRICS if is_training else SCORES)).open("a"):
        pass
      if is_training and jax.process_index() == 0:
        retention.probe(folder / checkpointer.FOLDER)
  except OSError as e:
    return [atomic_files.folder_error(workdir, e)]
  return []


def given_data_errors(data: object) -> list[str]:
  """Returns why an object passed as data is not a `batch.Data`."""
  errors = []
  for key in ("num_examples", "num_classes"):
    value = getattr(data, key, None)
    if not isinstance(value, int) or value < 1:
      errors.append(f"data.{key}: got {value!r}, expected an int, 1 or more.")
  names = getattr(data, "class_names", ())
  if names is not None and len(names) != getattr(data, "num_classes", None):
    errors.append(
      f"data.class_names: got {len(names)}, expected one for each of"
      " data.num_classes, or None."
    )
  if not callable(getattr(data, "batches", None)):
    errors.append(
      "data.batches: got none, expected (start_step, process_index,"
      f" process_count) -> batches; see {batch.Data.__module__}.Data."
    )
  return errors


def mesh_errors(config: Config) -> list[str]:
  """Returns errors of the mesh on all devices of all processes."""
  if errors := sharding.mesh_errors(config):
    return errors
  return sharding.row_errors(sharding.make_mesh(config.mesh))
