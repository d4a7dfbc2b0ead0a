"""Distillation: a student learns from a frozen teacher on the same pixels.

The teacher is any model that `vit_jax.load` reads, with the normalisation of
its own training, which is a part of its patch embedding. It computes all rows
of a device once a step, without a gradient.

- logits: T^2 KL(p || q), where p and q are the softmax of the logits of teacher
  and student, divided by the temperature T; labels are not used. With mixup=1.0
  this is the function matching of arXiv:2106.05237 (big_vision's code; T is 1
  there). Both see the same mixed pixels.
- soft: (1 - alpha) cross-entropy of the labels + alpha T^2 KL(p || q):
  arXiv:2012.12877, equation 2. (DeiT's code divides the KL by the number of
  classes, too.)
- hard: (1 - alpha) cross-entropy of the labels + alpha cross-entropy of the
  teacher's most probable class; equation 3, with alpha 1/2. Only the labels are
  smoothed.
- features: the vector of the image (what the head gets, such as the class
  token) and the patch tokens after the last norm, each after a linear map from
  the student's width to the teacher's. The loss is the distance of the vectors
  plus the mean distance of the patches. Tokens of a teacher with another grid
  are resampled to the student's grid: bilinear, antialiased if it shrinks.

With `token`, the student has the distillation token of DeiT: in soft and hard
the label term is that of the class token's head, and the teacher's term that of
the distillation token's head. Their mean predicts.

The softmax is taken of any teacher's logits, also of those that were trained
with a sigmoid for each class.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vit_jax.batch import View, has_vectors, normalise
from vit_jax.class_names import by_name, shortened
from vit_jax.data.preprocessing import image_size as size_after
from vit_jax.families import ModelConfig
from vit_jax.objectives import mixing
from vit_jax.objectives.objective import (
  Frozen,
  Learner,
  LoadedModel,
  Objective,
  Targets,
)
from vit_jax.options import ABOVE_0, AT_LEAST_0, SHARE, option, unexpected

if TYPE_CHECKING:
  import flax.linen as nn
  import jax

TEACHER = "teacher"  # the model, and its view of a record
ROWS = 64  # most images that pass the teacher at once on a device

# Options that only some losses read.
READ_BY = {
  "temperature": ("logits", "soft"),
  "alpha": ("soft", "hard"),
  "label_smoothing": ("soft", "hard"),
  "token": ("soft", "hard"),
  "distance": ("features",),
}


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
  """Outputs or features of a frozen teacher, with or without labels."""

  kind: str = "distillation"
  teacher: str = option(
    "", "weights of the teacher: anything that vit_jax.load reads"
  )
  loss: str = option(
    "logits",
    "what is learned from the teacher",
    {
      "logits": "its distribution over the classes, without labels",
      "soft": "the same beside the labels (DeiT)",
      "hard": "its most probable class beside the labels (DeiT)",
      "features": "its class token and patch tokens, without labels",
    },
  )
  temperature: float = option(
    1.0, "logits, soft: divisor of all logits; DeiT: 3.0", limit=ABOVE_0
  )
  alpha: float = option(
    0.5,
    "soft, hard: weight of the teacher's term, the labels have the rest; DeiT's"
    " soft: 0.1",
    limit=SHARE,
  )
  token: bool = option(
    False,
    "soft, hard: whether the teacher's term is that of the distillation token"
    " (config.model.distilled), and the labels' that of the class token",
  )
  distance: str = option(
    "cosine",
    "features: distance of a vector to the teacher's",
    {
      "cosine": "1 - the cosine of their angle",
      "smooth_l1": "the mean over channels of d^2 / 2, or |d| - 1/2 above 1",
    },
  )
  label_smoothing: float = option(
    0.0,
    "soft, hard: share of the label's target spread over all classes; DeiT:"
    " 0.1",
    limit=SHARE,
  )
  mixup: float = option(
    0.0,
    "alpha of mixup's Beta distribution, one draw a step, the same for the"
    " teacher; 1.0: uniform (function matching); 0: off",
    limit=AT_LEAST_0,
  )
  cutmix: float = option(
    0.0,
    "alpha of cutmix; with both, each takes half of the steps; DeiT: 1.0",
    limit=AT_LEAST_0,
  )
  teacher_ops: str | None = option(
    None,
    "preprocessing of the teacher's images, to give it another size: that of"
    " config.data.ops with another number, whose crop and flip it shares; None:"
    " the student's pixels",
  )
  teacher_dtype: str = option(
    "float32",
    "type of the teacher's matrix products and of their kernels in memory",
    {
      "float32": "24 bits of mantissa",
      "bfloat16": "8 bits of mantissa, half of the memory",
    },
  )

  own: ClassVar[str] = "distillation/"
  # Of the end of a path, as in `ModelConfig.SHARDING`.
  SHARDING: ClassVar = ((r"distillation/\w+/kernel", ("fsdp", "tensor")),)

  @property
  def trains_head(self) -> bool:
    """See `Objective`."""
    return self.loss != "features"

  @property
  def head_loss(self) -> str | None:
    """See `Objective`."""
    return "softmax" if self.trains_head else None

  @property
  def reads_labels(self) -> bool:
    """Whether the loss has a term of the labels."""
    return self.loss in ("soft", "hard")

  def errors(self) -> Iterator[str]:
    """See `Objective`."""
    where = "config.objective"
    if not self.teacher:
      expected = "weights that vit_jax.load reads"
      yield unexpected(f"{where}.teacher", "none", expected)
    for field in dataclasses.fields(self):
      losses, value = READ_BY.get(field.name), getattr(self, field.name)
      if losses and self.loss not in losses and value != field.default:
        expected = f"{field.default!r} for {where}.loss={self.loss!r}"
        yield unexpected(f"{where}.{field.name}", repr(value), expected)
    if self.cutmix and self.teacher_ops is not None:
      expected = f"0 with {where}.teacher_ops: a box has whole pixels"
      yield unexpected(f"{where}.cutmix", self.cutmix, expected)

  def model_errors(self, model, image_size) -> Iterator[str]:
    """See `Objective`."""
    if not self.trains_head and model.num_tokens(image_size) is None:
      expected = "a Transformer for config.objective.loss='features'"
      yield unexpected("config.model.variant", repr(model.variant), expected)
    if self.token and not getattr(model, "distilled", False):
      expected = "True for config.objective.token (config.model.name=modern)"
      yield unexpected("config.model.distilled", False, expected)

  def data_errors(self, data) -> Iterator[str]:
    """See `Objective`."""
    if self.trains_head and has_vectors(data):
      name = getattr(data, "name", type(data).__name__)
      expected = f"'features', as an image of {name!r} has no single class"
      yield unexpected("config.objective.loss", repr(self.loss), expected)

  def models(self) -> dict[str, str]:
    """See `Objective`."""
    return {TEACHER: self.teacher}

  def models_size(self, image_size) -> tuple[int, int]:
    """See `Objective`."""
    return size_after(self.teacher_ops) if self.teacher_ops else image_size

  def make_errors(self, model, run_shape, models) -> Iterator[str]:
    """See `Objective`."""
    teacher, where = models[TEACHER], "config.objective.teacher"
    if teacher.config.channels != model.channels:
      got = f"a model for images of {teacher.config.channels} channels"
      yield unexpected(where, got, f"{model.channels}, as the student has")
    if not self.trains_head:
      if teacher.config.num_tokens(teacher.image_size) is None:
        got = f"{teacher.config.variant}, which has no patch tokens"
        expected = "a Transformer, or config.objective.loss='logits'"
        yield unexpected(where, got, expected)
    elif not teacher.num_classes:
      expected = "one with a head, or config.objective.loss='features'"
      yield unexpected(where, "a model without a head", expected)
    elif getattr(teacher, "loss", None) == "regression":
      yield unexpected(where, "a model that predicts numbers", "classes")
    elif _columns(teacher, run_shape) is None:
      names = run_shape.class_names or ()
      theirs = getattr(teacher, "class_names", None) or ()
      got = f"{teacher.num_classes:,} classes ({shortened(theirs)})"
      expected = f"the {run_shape.num_classes:,} of the data"
      yield unexpected(where, got, f"{expected} ({shortened(names)})")

  def views(self, ops: str) -> dict[str, View]:
    """See `Objective`."""
    if self.teacher_ops is None:
      return super().views(ops)
    return {"image": View(ops), TEACHER: View(self.teacher_ops, like="image")}

  def paired(self, batch):
    """See `Objective`."""
    if not (self.mixup or self.cutmix):
      return batch
    return mixing.paired(batch, self.views("decode"))

  def make(self, model, run_shape, models):
    """Returns the student, its teacher and the loss; see `Objective.make`.

    Further metrics: `labels` and `teacher`, the two terms before their weights,
    or `vector` and `patches`; `agreement`, the share of images for which
    student and teacher predict the same class.

    Args:
      model: `config.model`, the student.
      run_shape: num_classes is the width of the student's head; image_size.
      models: The teacher, read for images of `models_size`.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax.losses import smooth, softmax_xent, targets_of
    from vit_jax.models import build
    from vit_jax.models.resample import METHODS

    given = models[TEACHER]
    teacher = frozen(given, self.teacher_dtype)
    num_classes = run_shape.num_classes
    flops = 2 * teacher.config.forward_macs(
      teacher.image_size, teacher.num_classes
    )
    if self.trains_head:
      module = build(model, num_classes)
      columns = _columns(given, run_shape)
      flops += model.train_flops(run_shape.image_size, num_classes)
    else:
      grid = model.grid(run_shape.image_size)
      old_grid = teacher.config.grid(teacher.image_size)
      resizing = [*map(METHODS["bilinear"], old_grid, grid)]
      out = _shapes_of(teacher.model, teacher.image_size, model.channels)
      widths = {k: out[k].shape[-1] for k in ("pre_logits", "encoded")}
      module = student(
        build(model, 0), *widths.values(), math.prod(grid), model.dtype
      )
      out = _shapes_of(module, run_shape.image_size, model.channels)
      macs = out["pre_logits"].shape[-1] * widths["pre_logits"]
      macs += math.prod(grid) * out["encoded"].shape[-1] * widths["encoded"]
      flops += model.train_flops(run_shape.image_size, 0) + 6 * macs

    def pixels(batch, view, rng):
      """Returns images of a view in [-1, 1] and targets of the labels."""

      def examples(rows):
        if not self.reads_labels:
          return normalise(rows[view]), jnp.zeros((len(rows["mask"]), 1))
        targets = targets_of(rows["label"], num_classes)
        return normalise(rows[view]), smooth(targets, self.label_smoothing)

      if (partner := batch.get(mixing.PARTNER)) is None:
        return examples(batch)
      return mixing.mix(
        *(*examples(batch), examples(partner), partner["mask"]),
        *(rng, self.mixup, self.cutmix),
      )

    def targets(params, batch, rng, step, memory, over):
      view = TEACHER if TEACHER in batch else "image"

      def of_rows(batch):
        images, _ = pixels(batch, view, rng)
        logits, out = teacher.model.apply({"params": params}, images)
        if self.trains_head:
          logits = logits.astype(jnp.float32)[:, columns]
          return logits.argmax(-1) if self.loss == "hard" else logits
        out = {k: out[k].astype(jnp.float32) for k in ("pre_logits", "encoded")}
        patches = out["encoded"][:, -math.prod(old_grid) :]
        if grid != old_grid:
          to = [jnp.asarray(m, jnp.float32) for m in resizing]
          x = patches.reshape(len(images), *old_grid, -1)
          x = jnp.einsum("yh,xw,bhwd->byxd", *to, x)
          patches = x.reshape(len(images), math.prod(grid), -1)
        return {"vector": out["pre_logits"], "patches": patches}

      num_rows = len(batch["mask"])
      at_least = -(-num_rows // ROWS)
      number = next(
        n for n in range(at_least, num_rows + 1) if num_rows % n == 0
      )
      parts = jax.tree.map(
        lambda x: x.reshape(number, num_rows // number, *x.shape[1:]), batch
      )
      rows = jax.lax.map(of_rows, parts)
      return Targets(
        jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), rows)
      )

    def loss(params, batch, rng, step):
      images, labels = pixels(batch, "image", rng)
      logits, out = module.apply(
        {"params": params},
        images,
        is_training=True,
        records=batch["index"],
        rngs={"dropout": rng},
      )
      wanted, terms = batch["targets"], {}
      if not self.trains_head:
        for name, x in out["projected"].items():
          x = x.astype(jnp.float32)
          terms[name] = _distance(x, wanted[name], self.distance)
        terms["patches"] = terms["patches"].mean(-1)
        losses = terms["vector"] + terms["patches"]
      else:
        of_labels = of_teacher = logits.astype(jnp.float32)
        if self.token:
          of_labels = out["class_logits"].astype(jnp.float32)
          of_teacher = out["distillation_logits"].astype(jnp.float32)
        best = wanted
        if self.loss == "hard":
          one_hot = jax.nn.one_hot(wanted, num_classes)
          losses = softmax_xent(of_teacher, one_hot)
        else:
          best = wanted.argmax(-1)
          losses = divergence(wanted, of_teacher, self.temperature)
        terms["agreement"] = of_teacher.argmax(-1) == best
        if self.reads_labels:
          terms["teacher"] = losses
          terms["labels"] = softmax_xent(of_labels, labels)
          losses = (1 - self.alpha) * terms["labels"] + self.alpha * losses
      count = jnp.sum(batch["mask"], dtype=jnp.float32)
      named = {k: (jnp.sum(v * batch["mask"]), count) for k, v in terms.items()}
      return jnp.sum(losses * batch["mask"]), count, named

    return Learner(
      module, loss, Frozen(teacher), targets, train_flops=float(flops)
    )


def divergence(
  teacher: "jax.Array", student: "jax.Array", temperature: float
) -> "jax.Array":
  """Returns T^2 KL(p || q), p and q the softmax of the logits divided by T.

  The factor keeps the gradient's size at any temperature.

  Args:
    teacher, student: Logits, float32 [b, classes].
    temperature: T.

  Returns:
    Float32 [b], nats.

  Source: arXiv:1503.02531, section 2.
  """
  import jax
  import jax.numpy as jnp

  log_p, log_q = (
    jax.nn.log_softmax(x / temperature) for x in (teacher, student)
  )
  return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _distance(a: "jax.Array", b: "jax.Array", kind: str) -> "jax.Array":
  """Returns the distance of vectors [..., d], see `Distillation.distance`."""
  import jax.numpy as jnp

  if kind == "cosine":
    squares = jnp.square(a).sum(-1) * jnp.square(b).sum(-1)
    return 1 - (a * b).sum(-1) / jnp.sqrt(jnp.maximum(squares, 1e-12))
  d = jnp.abs(a - b)
  return jnp.where(d < 1, d * d / 2, d - 0.5).mean(-1)


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A model as the step computes it: a `LoadedModel`."""

  config: ModelConfig
  params: dict[str, Any]
  num_classes: int
  image_size: tuple[int, int]

  @functools.cached_property
  def model(self) -> "nn.Module":
    """The linen module."""
    from vit_jax.models import build

    return build(self.config, self.num_classes)


def frozen(given: LoadedModel, dtype: str) -> Teacher:
  """Returns a model in the form in which a step computes it.

  Its blocks are in a scan, so that a device has the whole parameters of only
  one block at a time. With bfloat16, the kernels that would be cast in every
  step (`ModelConfig.CAST`) are stored so; the results are the same.

  Args:
    given: The model; its parameters may be shapes.
    dtype: Type of the matrix products.
  """
  import re

  import jax
  from flax.traverse_util import flatten_dict, unflatten_dict

  from vit_jax.models.stacking import stack_blocks

  config = dataclasses.replace(given.config, dtype=dtype)
  config = config.stacked() or config

  def stored(path, x):
    is_cast = config.CAST is not None and re.search(config.CAST, path)
    return x.astype(jax.numpy.dtype(dtype)) if is_cast else x

  def prepared(params):
    flat = flatten_dict(params, sep="/")
    params = unflatten_dict({k: stored(k, x) for k, x in flat.items()}, sep="/")
    return stack_blocks(params, config) if config.scan else params

  are_shapes = isinstance(
    jax.tree.leaves(given.params)[0], jax.ShapeDtypeStruct
  )
  make = functools.partial(jax.eval_shape, prepared) if are_shapes else prepared
  return Teacher(
    config, make(given.params), given.num_classes, given.image_size
  )


def student(
  network: "nn.Module",
  vector: int,
  patches: int,
  num_patches: int,
  dtype: str,
) -> "nn.Module":
  """Returns a network whose intermediates have `projected`.

  That is its pre_logits as "vector" [b, vector] and its last `num_patches`
  tokens as "patches" [b, n, patches], after linear maps.

  Args:
    network: A Transformer without a head.
    vector, patches: Widths of the teacher.
    num_patches: Number of patches, which are the last tokens.
    dtype: Type of the patches' product.
  """
  import flax.linen as nn

  class Projections(nn.Module):
    """The linear maps; the objective's own parameters."""

    def setup(self):
      self.vector = nn.Dense(vector)
      self.patches = nn.Dense(patches, dtype=dtype)

    def __call__(self, out):
      tokens = out["encoded"][:, -num_patches:]
      return {
        "vector": self.vector(out["pre_logits"]),
        "patches": self.patches(tokens),
      }

  class Student(nn.Module):
    """The network with these maps of its vector and tokens."""

    network: nn.Module

    def setup(self):
      nn.share_scope(self, self.network)
      self.distillation = Projections()

    def __call__(self, images, **options):
      x, out = self.network(images, **options)
      return x, {**out, "projected": self.distillation(out)}

  return Student(network)


def _shapes_of(
  module: "nn.Module", image_size: Sequence[int], channels: int
) -> dict[str, Any]:
  """Returns the shapes of a module's intermediates for one image."""
  import jax

  images = jax.ShapeDtypeStruct((1, *image_size, channels), "float32")
  (_, out), _ = jax.eval_shape(
    module.init_with_output, jax.random.key(0), images
  )
  return out


def _columns(teacher: LoadedModel, run_shape) -> Any:
  """Returns the teacher's column of each class of the student, by name.

  Without names on one of both sides, the numbers of classes must be equal.
  None if the classes differ.
  """
  import numpy as np

  number = run_shape.num_classes
  theirs = getattr(teacher, "class_names", None)
  names = run_shape.class_names or ()
  if len(names) == number and theirs:
    columns = by_name(names, theirs)
    # TFDS calls the classes of some data "0", "1", ...
    if columns is not None or [*names] != [*map(str, range(number))]:
      return columns
  return np.arange(number) if teacher.num_classes == number else None
