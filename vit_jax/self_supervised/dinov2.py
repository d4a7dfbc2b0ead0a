"""DINOv2: DINO on class tokens, and iBOT on masked patches, without labels.

As in DINO, a student learns the distributions over prototypes of a teacher, its
running mean, which sees other crops. In addition, half of the student's large
crops have masked patches, for which it learns what the teacher scores there.
KoLeo spreads the class tokens of a batch. With Gram anchoring, the similarities
of an image's patches stay those of an earlier, frozen teacher.

The loss is the mean over the images of the batch of

  DINO + patches iBOT + koleo (KoLeo of each large crop) + gram Gram,

with DINO the mean over all pairs of a teacher's large crop and another crop of
the student, iBOT the mean over both large crops, and of a crop the mean over
its masked patches, which is 0 without any.

Source: arXiv:2304.07193, 2111.07832 (iBOT), 2508.10104 (Gram anchoring);
  facebookresearch/dinov2 and dinov3, `ssl_meta_arch.py`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

from vit_jax.batch import View, normalise
from vit_jax.objectives.objective import Average, Frozen, Learner, Targets
from vit_jax.options import AT_LEAST_0, AT_LEAST_1, Limit, option, unexpected
from vit_jax.self_supervised.dino import DINO, GLOBAL, MOMENTUM, is_labelled

MASKED = 0.5  # share of the large crops with masked patches
RATIOS = (0.1, 0.5)  # smallest and largest share of a crop's masked patches
LOCAL_OPS = (
  "decode|random_resized_crop(96, 0.05, 0.32)|flip_lr"
  "|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)|gaussian_blur(0.5)"
)
AT_LEAST_2 = Limit("2 or more", lambda x: x >= 2)


@dataclasses.dataclass(frozen=True)
class DINOv2(DINO):
  """DINO, iBOT on masked patches, KoLeo, and Gram anchoring."""

  kind: str = "dinov2"
  local_ops: str = option(LOCAL_OPS, "operations of the small crops")
  teacher_momentum: float = option(
    0.992,
    "weight of the teacher in its running mean at first; it rises to 1 along"
    " half a cosine over the run",
    limit=MOMENTUM,
  )
  patches: float = option(
    1.0, "weight of the masked patches' loss (iBOT)", limit=AT_LEAST_0
  )
  patch_head: bool = option(False, "whether patches have a head of their own")
  patch_bottleneck: int = option(
    256,
    "width of the vectors before the prototypes in the patches' own head",
    limit=AT_LEAST_1,
  )
  koleo: float = option(
    0.1,
    "weight of KoLeo for each large crop. Above 0, all rows of a device are"
    " computed at once, without optim.microbatch",
    limit=AT_LEAST_0,
  )
  koleo_group: int | None = option(
    None,
    "consecutive rows of a batch among which KoLeo finds neighbours; in the"
    " published runs the images of a GPU. None: the whole batch",
    limit=AT_LEAST_2,
  )
  gram: float = option(
    0.0, "weight of Gram anchoring; DINOv3: 2", limit=AT_LEAST_0
  )
  gram_model: str | None = option(
    None,
    "weights of the earlier teacher, anything that vit_jax.load reads, such as"
    " the run that is continued",
  )
  gram_ops: str | None = option(
    None,
    "operations of the earlier teacher's crops. They are the student's large"
    " crops, possibly at another size, whose features are resized (DINOv3:"
    " twice the side, without changes of colour). None: the same crops",
  )

  own: ClassVar[str] = "dinov2/"
  SHARDING: ClassVar[tuple] = (
    (r"dinov2/\w+/Dense_\d+/kernel", ("fsdp", None)),
    (r"dinov2/\w+/prototypes/kernel", ("fsdp", "tensor")),
    (r"dinov2/\w+/prototypes/gain/kernel", ("tensor",)),
  )

  def views(self, ops) -> dict[str, View]:
    """Returns two large crops, the small ones, and the earlier teacher's."""
    views = super().views(ops)
    if self.gram_ops is not None:
      for name in GLOBAL:
        views[f"gram_{name}"] = View(self.gram_ops, like=name)
    return views

  def models(self) -> dict[str, str]:
    """Returns the earlier teacher's weights."""
    return {"gram": self.gram_model} if self.gram_model else {}

  def errors(self) -> Iterator[str]:
    """See `Objective`."""
    yield from super().errors()
    if bool(self.gram) != bool(self.gram_model):
      where = "config.objective.gram_model"
      expected = f"weights if, and only if, gram is above 0; gram={self.gram}"
      yield unexpected(where, repr(self.gram_model), expected)
    if self.gram_ops is not None and not self.gram:
      where = "config.objective.gram_ops"
      yield unexpected(where, repr(self.gram_ops), "None for gram=0")

  def model_errors(self, model, image_size) -> Iterator[str]:
    """See `Objective`."""
    from vit_jax.self_supervised.heads import reads_token

    if model.pixel_patch is None or not reads_token(model):
      where, got = "config.model", f"name={model.name}, {model.variant}"
      expected = (
        f"patches of pixels and a class token for kind={self.kind}, such as"
        " name=modern, variant=B/16, pool=token"
      )
      yield unexpected(where, got, expected)
      return
    yield from super().model_errors(model, image_size)

  def make_errors(self, model, run_shape, models) -> Iterator[str]:
    """See `Objective`."""
    if not (given := models.get("gram")):
      return
    size = self._gram_size(run_shape)
    if given.config.pixel_patch is None:
      got = f"a model of the family {given.config.name}"
      yield unexpected("config.objective.gram_model", got, "one with patches")
      return
    for error in given.config.size_errors(size):
      yield f"config.objective.gram_model: {error}"

  def _gram_size(self, run_shape) -> tuple[int, int]:
    from vit_jax.data.preprocessing import image_size

    if self.gram_ops is None:
      return run_shape.image_size
    return image_size(self.gram_ops)

  def head(self, model):
    """Returns mask token and heads, a module named as their parameters."""
    from vit_jax.self_supervised.heads import DINOHead
    from vit_jax.self_supervised.masked_crops import Heads

    def head(bottleneck):
      return DINOHead(
        self.prototypes,
        self.hidden,
        bottleneck,
        self.head_layers,
        has_gain=not self.norm_last_layer,
        dtype=model.dtype,
      )

    return Heads(
      head(self.bottleneck),
      head(self.patch_bottleneck) if self.patch_head else None,
      model.size.width,
      name=self.own.removesuffix("/"),
    )

  def make(self, model, run_shape, models):
    """Returns student, teacher, targets and loss; see `Objective.make`.

    Logged beside the loss: `dino_loss`, `ibot_loss`, `koleo` and `gram`, its
    parts without their weights; what `DINO.make` logs; `patch_entropy`, the
    mean entropy of the targets of masked patches, in nats.

    Args:
      model: `config.model`, with patches of pixels and a class token.
      run_shape: image_size and total_steps are used.
      models: "gram", the earlier teacher, if `gram` is above 0.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vit_jax.models import build
    from vit_jax.self_supervised import block_masks, masked_crops, patch_scores
    from vit_jax.self_supervised import gram as gram_lib
    from vit_jax.self_supervised import koleo as koleo_lib
    from vit_jax.self_supervised import targets as lib
    from vit_jax.self_supervised.heads import crop_records
    from vit_jax.self_supervised.online_knn import right_neighbours

    head, number = self.head(model), len(GLOBAL)
    module = masked_crops.MaskedCrops(
      build(model, 0), head, model, run_shape.image_size
    )
    num_crops = number + self.local_crops
    grid = model.grid(run_shape.image_size)
    has_classes = run_shape.num_classes > 0
    earlier = models.get("gram")
    if earlier is not None:
      gram_grid = earlier.config.grid(self._gram_size(run_shape))
      gram_features = masked_crops.features(
        earlier.model, earlier.config, earlier.image_size
      )

    def large(batch, prefix=""):
      return jnp.stack([batch[prefix + name] for name in GLOBAL], 1)

    def flat(x):
      """[b, v, ...] -> [b v, ...]"""
      return x.reshape(-1, *x.shape[2:])

    def by_crop(x, v=number):
      """[b v, ...] -> [b, v, ...]"""
      return x.reshape(-1, v, *x.shape[1:])

    def draw_masks(batch, rng, over):
      """Draws the masks of large crops; arrays [b, v, ...]."""
      rows = len(batch["index"])
      num_rows = len(over.gather(batch["mask"]))
      key_order, key_blocks = jax.random.split(jax.random.fold_in(rng, 1))
      crops = over.rows(rows)[:, None] * number + jnp.arange(number)[None]
      ratio = block_masks.ratios(
        key_order, crops.reshape(-1), number * num_rows, MASKED, *RATIOS
      )
      records = crop_records(batch["index"], 0, number, num_crops)
      keys = jax.vmap(lambda r: jax.random.fold_in(key_blocks, r))(records)
      masks = block_masks.draw(keys, ratio, grid, RATIOS[1])
      return jax.tree.map(by_crop, masks)

    def targets(teacher, batch, rng, step, memory, over):
      frozen = None
      if earlier is not None:
        teacher, frozen = teacher
      masks, valid = draw_masks(batch, rng, over), batch["mask"]
      seen = module.apply(
        {"params": teacher},
        normalise(flat(large(batch))),
        None,
        flat(masks.places),
        method="crops",
      )
      temperature, new = self.temperature(step), None
      weights = jnp.repeat(valid.astype(jnp.float32), number)
      counts = (flat(masks.weights) > 0) * weights[:, None]
      of_patches = seen.chosen, seen.prototypes
      if self.centring == "sinkhorn":
        p = lib.sinkhorn(seen.scores, temperature, weights, over)
        offsets = patch_scores.sinkhorn_offsets(
          *of_patches, temperature, counts, over, model.dtype
        )
      elif self.centring == "mean":
        p = lib.sharpened(seen.scores, temperature, memory["centre"])
        offsets = -memory["patch_centre"] / temperature
        mean = patch_scores.mean_scores(*of_patches, counts, over)
        new = {
          "centre": lib.moved_centre(
            memory["centre"], seen.scores, weights, over
          ),
          "patch_centre": lib.CENTRE_MOMENTUM * memory["patch_centre"]
          + (1 - lib.CENTRE_MOMENTUM) * mean,
        }
      else:
        p = lib.sharpened(seen.scores, temperature)
        offsets = jnp.zeros(self.prototypes)
      rows = {
        "p": by_crop(p),
        "patches": by_crop(seen.chosen),
        **masks._asdict(),
      }
      shared = {
        "kl": math.log(self.prototypes) - lib.entropy(over.mean(p, weights)),
        "offsets": offsets,
        "prototypes": seen.prototypes,
      }
      if has_classes and is_labelled(batch):
        vectors = by_crop(seen.vectors)
        rows["is_right"], rows["counts"] = right_neighbours(
          vectors[:, 0], vectors[:, 1], batch["label"], valid, over
        )
      if frozen is not None:
        prefix = "" if self.gram_ops is None else "gram_"
        features = gram_features(frozen, normalise(flat(large(batch, prefix))))
        rows["gram"] = by_crop(gram_lib.resized(features, gram_grid, grid))
      return Targets(rows, shared, new)

    def loss(params, batch, rng, step, over=None):
      given, mask = batch["targets"], batch["mask"].astype(jnp.float32)
      records = lambda *args: crop_records(batch["index"], *args, num_crops)
      seen = module.apply(
        {"params": params},
        normalise(flat(large(batch))),
        records(0, number),
        flat(given["places"]),
        flat(given["masked"]),
        rngs={"dropout": rng},
        method="crops",
      )
      small = None
      if self.local_crops:
        small, _ = module.apply(
          {"params": params},
          normalise(flat(batch["local"])),
          records(number, self.local_crops),
          # Factors of rotary positions of their own.
          rngs={"dropout": jax.random.fold_in(rng, 2)},
          method="scores",
        )
        small = by_crop(small, self.local_crops)
      p = given["p"]
      dino = lib.loss_of_crops(
        p, by_crop(seen.scores), small, self.student_temperature
      )
      ibot, entropies = patch_scores.cross_entropies(
        (seen.chosen, seen.prototypes, self.student_temperature),
        (
          flat(given["patches"]),
          batch["shared"]["prototypes"],
          self.temperature(step),
        ),
        batch["shared"]["offsets"],
        flat(given["weights"]),
        model.dtype,
      )
      ibot = by_crop(ibot).mean(1)
      total, parts = dino + self.patches * ibot, {}
      parts |= {"dino_loss": dino, "ibot_loss": ibot}
      if over is not None:
        vectors, valid = by_crop(seen.vectors), batch["mask"]
        parts["koleo"] = sum(
          koleo_lib.losses(vectors[:, v], valid, over, self.koleo_group)
          for v in range(number)
        )
        total += self.koleo * parts["koleo"]
      if earlier is not None:
        gram = gram_lib.losses(seen.patches, flat(given["gram"]))
        parts["gram"] = by_crop(gram).mean(1)
        total += self.gram * parts["gram"]
      parts["teacher_entropy"] = lib.entropy(p).mean(1)
      count = jnp.sum(mask)
      named = {k: (jnp.sum(x * mask), count) for k, x in parts.items()}
      has_masks = flat(given["weights"]).sum(1) * jnp.repeat(mask, number)
      named["patch_entropy"] = (
        jnp.sum(entropies * jnp.repeat(mask, number)),
        jnp.sum(has_masks),
      )
      named["teacher_kl"] = batch["shared"]["kl"] * count, count
      if has_classes and is_labelled(batch):
        right = jnp.sum(given["is_right"] * given["counts"])
        named["online_knn"] = right, jnp.sum(given["counts"])
      return jnp.sum(total * mask), count, named

    memory = None
    if self.centring == "mean":
      zeros = np.zeros(self.prototypes, np.float32)
      memory = {"centre": zeros, "patch_centre": zeros.copy()}
    teacher = Average(self.momentum(run_shape.total_steps), is_published=True)
    return Learner(
      module,
      loss,
      teacher=teacher if earlier is None else (teacher, Frozen(earlier)),
      targets=targets,
      memory=memory,
      init=lambda params, rng: masked_crops.initial(
        params, rng, self.own, model.pixel_patch
      ),
      train_flops=self._flops(model, run_shape, head, earlier),
      whole_batch=self.koleo > 0,
    )

  def _flops(self, model, run_shape, head, earlier) -> float:
    """Returns the FLOPs of an image's step; see `DINO.flops`."""
    size = run_shape.image_size
    rows, columns = model.grid(size)
    places = len(GLOBAL) * int(rows * columns * RATIOS[1])
    # The student's three passes, and the teacher's.
    flops = self.flops(model, size, head)
    flops += 8 * places * head.of_patches.macs(model.size.width)
    if earlier is not None:
      size = self._gram_size(run_shape)
      flops += 2 * len(GLOBAL) * earlier.config.forward_macs(size, 0)
    return float(flops)
