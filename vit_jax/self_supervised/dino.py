"""DINO: a student learns a running mean of itself on other crops, no labels.

The teacher scores two large crops of an image, the student these and several
small ones. The student learns the teacher's distribution over prototypes for
every other crop.

Source: arXiv:2104.14294; facebookresearch/dino, `main_dino.py`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import View, normalise
from vit_jax.objectives.objective import Average, Learner, Objective, Targets
from vit_jax.options import (
  ABOVE_0,
  AT_LEAST_0,
  AT_LEAST_1,
  Limit,
  option,
  unexpected,
)

GLOBAL = ("global_1", "global_2")
MOMENTUM = Limit("0 to 1", lambda x: 0 <= x <= 1)
LOCAL_OPS = (
  "decode|random_resized_crop(96, 0.05, 0.4)|flip_lr"
  "|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)|gaussian_blur(0.5)"
)


@dataclasses.dataclass(frozen=True)
class DINO(Objective):
  """A running mean of the model as teacher, on crops of an image."""

  kind: str = "dino"
  prototypes: int = option(65_536, "scores of the head", limit=AT_LEAST_1)
  hidden: int = option(2048, "width of the head's layers", limit=AT_LEAST_1)
  bottleneck: int = option(
    256, "width of the vectors before the prototypes", limit=AT_LEAST_1
  )
  head_layers: int = option(
    3, "linear layers before the prototypes", limit=AT_LEAST_1
  )
  norm_last_layer: bool = option(
    True, "whether prototypes have the norm 1; otherwise a learned one"
  )
  second_ops: str | None = option(
    None,
    "operations of the second large crop, in the language of data.ops, which"
    " has those of the first; None: the same",
  )
  local_ops: str = option(LOCAL_OPS, "operations of the small crops")
  local_crops: int = option(
    8, "small crops of an image; 0: none", limit=AT_LEAST_0
  )
  teacher_momentum: float = option(
    0.996,
    "weight of the teacher in its running mean at first; it rises to 1 along"
    " half a cosine over the run. Small batches need more: 0.9995 for 256",
    limit=MOMENTUM,
  )
  student_temperature: float = option(
    0.1, "temperature of the student's softmax", limit=ABOVE_0
  )
  teacher_temperature: float = option(
    0.04, "temperature of the teacher's softmax", limit=ABOVE_0
  )
  teacher_temperature_start: float | None = option(
    None,
    "temperature of the teacher in the first step; it rises in a line to"
    " teacher_temperature. None: teacher_temperature",
    limit=ABOVE_0,
  )
  temperature_steps: int = option(
    0,
    "steps of that rise, the first and the last included",
    limit=AT_LEAST_0,
  )
  centring: str = option(
    "mean",
    "what keeps the teacher's scores from being the same for all images",
    {
      "mean": "a running mean of the scores is subtracted",
      "sinkhorn": "prototypes are used alike in each batch (Sinkhorn-Knopp)",
      "none": "nothing, to see the collapse",
    },
  )

  trains_head: ClassVar[bool] = False
  own: ClassVar[str] = "dino/"
  compares_images: ClassVar[bool] = True
  follows_length: ClassVar[bool] = True
  SHARDING: ClassVar[tuple] = (
    (r"dino/Dense_\d+/kernel", ("fsdp", None)),
    (r"dino/prototypes/kernel", ("fsdp", "tensor")),
    (r"dino/prototypes/gain/kernel", ("tensor",)),
  )

  def views(self, ops) -> dict[str, View]:
    """Returns two large crops, and the small ones."""
    views = {GLOBAL[0]: View(ops), GLOBAL[1]: View(self.second_ops or ops)}
    if self.local_crops:
      views["local"] = View(self.local_ops, self.local_crops)
    return views

  def errors(self) -> Iterator[str]:
    """See `Objective`."""
    start = self.teacher_temperature_start
    if (start is None) != (self.temperature_steps == 0):
      expected = "both, or neither"
      got = f"{start} with temperature_steps={self.temperature_steps}"
      key = "config.objective.teacher_temperature_start"
      yield unexpected(key, got, expected)

  def model_errors(self, model, image_size) -> Iterator[str]:
    """See `Objective`."""
    from vit_jax.data.preprocessing import image_size as size_of

    if self.second_ops is not None:
      second = size_of(self.second_ops)
      if second != image_size:
        expected = "crops of {}x{}, as those of config.data.ops"
        yield unexpected(
          "config.objective.second_ops",
          "crops of {}x{} pixels".format(*second),
          expected.format(*image_size),
        )
    if not self.local_crops:
      return
    local = size_of(self.local_ops)
    where, got = "config.objective.local_ops", "crops of {}x{} pixels"
    got = got.format(*local)
    if list(model.size_errors(local)):
      expected = f"multiples of {model.stride} pixels, the side of a patch"
      yield unexpected(where, got, expected)
    elif local != image_size and not _takes_sizes(model):
      expected = (
        f"{image_size[0]}x{image_size[1]} for the positions of"
        f" config.model.name={model.name}, which are for one size; or"
        " config.model.posemb=learn or sincos2d"
      )
      yield unexpected(where, got, expected)

  def start_errors(self, model) -> Iterator[str]:
    """See `Objective`."""
    from vit_jax.self_supervised.heads import reads_token

    if model.pixel_patch is None:
      return
    names = ["pre_logits"]
    if reads_token(model):
      names += ["projection"]
      if model.pool == "map":
        yield unexpected(
          "config.model.pool", "'map'", f"'token' for kind={self.kind}"
        )
    for name in names:
      if value := getattr(model, name, None):
        expected = (
          f"no layer that config.objective.kind={self.kind} does not train; set"
          " it when you fine-tune"
        )
        yield unexpected(f"config.model.{name}", repr(value), expected)

  def momentum(self, total_steps: int | None):
    """Returns the teacher's momentum as a function of the updates applied."""
    import optax

    # Without training there is no length.
    rest = optax.cosine_decay_schedule(
      1.0 - self.teacher_momentum, total_steps or 1
    )
    return lambda step: 1.0 - rest(step)

  def temperature(self, step):
    """Returns the teacher's temperature after this number of updates."""
    import jax.numpy as jnp

    start, steps = self.teacher_temperature_start, self.temperature_steps
    if start is None:
      return jnp.float32(self.teacher_temperature)
    share = jnp.minimum(step / max(steps - 1, 1), 1.0)
    return start + (self.teacher_temperature - start) * share

  def head(self, model):
    """Returns the head, a linen module with the name of its parameters."""
    from vit_jax.self_supervised.heads import DINOHead

    return DINOHead(
      self.prototypes,
      self.hidden,
      self.bottleneck,
      self.head_layers,
      has_gain=not self.norm_last_layer,
      dtype=model.dtype,
      name=self.own.removesuffix("/"),
    )

  def num_tokens(self, model, image_size) -> int | None:
    """Returns the number of tokens of all crops."""
    from vit_jax.data.preprocessing import image_size as size_of

    large = model.num_tokens(image_size)
    if large is None or not self.local_crops:
      return large and len(GLOBAL) * large
    small = model.num_tokens(size_of(self.local_ops))
    return len(GLOBAL) * large + self.local_crops * small

  def make(self, model, run_shape, models):
    """Returns student, teacher, targets and loss; see `Objective.make`.

    Logged beside the loss: `teacher_entropy`, the mean entropy of the targets
    in nats (0 to log K: log K if each is uniform, a collapse); `teacher_kl`,
    the Kullback-Leibler divergence of their mean over the batch from the
    uniform distribution (0 to log K: log K if all are the same prototype, the
    other collapse); `online_knn`, the share of images whose nearest other image
    in the batch has the same label, if there are labels. The neighbour is that
    of the teacher's vectors: the first large crop's among the second ones'.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax.models import build
    from vit_jax.self_supervised import targets as lib
    from vit_jax.self_supervised.heads import MultiCrop, crop_records
    from vit_jax.self_supervised.online_knn import right_neighbours

    head = self.head(model)
    module = MultiCrop(build(model, 0), head, model, run_shape.image_size)
    num_crops = len(GLOBAL) + self.local_crops
    has_classes = run_shape.num_classes > 0

    def large(batch):
      return jnp.stack([batch[name] for name in GLOBAL], 1)

    def scores(params, crops, start=0, records=None, rng=None):
      """Returns scores [b, v, k] and vectors [b, v, d] of crops [b, v, ...]."""
      rows, number = crops.shape[:2]
      if records is not None:
        records = crop_records(records, start, number, num_crops)
      results = module.apply(
        {"params": params},
        normalise(crops.reshape(-1, *crops.shape[2:])),
        records,
        rngs=None if rng is None else {"dropout": rng},
        method="scores",
      )
      return jax.tree.map(lambda x: x.reshape(rows, number, -1), results)

    def targets(teacher, batch, rng, step, memory, over):
      z, vectors = scores(teacher, large(batch))
      temperature, new = self.temperature(step), None
      flat = z.reshape(-1, z.shape[-1])
      weights = jnp.repeat(batch["mask"].astype(jnp.float32), len(GLOBAL))
      if self.centring == "sinkhorn":
        p = lib.sinkhorn(flat, temperature, weights, over)
      elif self.centring == "mean":
        p = lib.sharpened(flat, temperature, memory["centre"])
        centre = lib.moved_centre(memory["centre"], flat, weights, over)
        new = {"centre": centre}
      else:
        p = lib.sharpened(flat, temperature)
      used = lib.entropy(over.mean(p, weights))
      rows = {"p": p.reshape(z.shape)}
      if has_classes and is_labelled(batch):
        rows["is_right"], rows["counts"] = right_neighbours(
          vectors[:, 0], vectors[:, 1], batch["label"], batch["mask"], over
        )
      return Targets(rows, {"kl": math.log(self.prototypes) - used}, new)

    def loss(params, batch, rng, step):
      p, mask = batch["targets"]["p"], batch["mask"].astype(jnp.float32)
      args, small = (batch["index"], rng), None
      of_large, _ = scores(params, large(batch), 0, *args)
      if self.local_crops:
        small, _ = scores(params, batch["local"], len(GLOBAL), *args)
      losses = lib.loss_of_crops(p, of_large, small, self.student_temperature)
      count = jnp.sum(mask)
      entropies = lib.entropy(p).mean(1)
      named = {
        "teacher_entropy": (jnp.sum(entropies * mask), count),
        "teacher_kl": (batch["shared"]["kl"] * count, count),
      }
      if has_classes and is_labelled(batch):
        counts = batch["targets"]["counts"]
        right = jnp.sum(batch["targets"]["is_right"] * counts)
        named["online_knn"] = right, jnp.sum(counts)
      return jnp.sum(losses * mask), count, named

    memory = None
    if self.centring == "mean":
      import numpy as np

      memory = {"centre": np.zeros(self.prototypes, np.float32)}
    return Learner(
      module,
      loss,
      teacher=Average(self.momentum(run_shape.total_steps), is_published=True),
      targets=targets,
      memory=memory,
      train_flops=self.flops(model, run_shape.image_size, head),
    )

  def flops(self, model, image_size, head) -> float:
    """Returns the FLOPs of an image's step: all crops, and the teacher's.

    The student's crops count three forward passes, the teacher's one.
    """
    from vit_jax.data.preprocessing import image_size as size_of

    def macs(size):
      network = model.forward_macs(size, 0)
      # The classifier's for one class: the width of a vector.
      width = model.forward_macs(size, 1) - network
      return network + head.macs(width)

    large = macs(image_size)
    small = macs(size_of(self.local_ops)) if self.local_crops else 0
    student = len(GLOBAL) * large + self.local_crops * small
    return float(6 * student + 2 * len(GLOBAL) * large)


def is_labelled(batch) -> bool:
  """Whether rows have one class each; -1 for a row without."""
  import jax.numpy as jnp

  label = batch.get("label")
  return label is not None and (
    label.ndim == 1 and jnp.issubdtype(label.dtype, jnp.integer)
  )


def _takes_sizes(model) -> bool:
  """Whether a model's parameters are for images of any size."""
  if model.pixel_patch is None:
    return not model.POSITIONS
  kinds = ("learn", "sincos2d", "none")
  return (
    getattr(model, "posemb", "none") in kinds
    and getattr(model, "posemb_at", "stem") != "blocks"
  )
