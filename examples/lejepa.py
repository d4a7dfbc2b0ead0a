"""LeJEPA: crops of an image agree, and their vectors are normally distributed.

There is no teacher, no stopped gradient, and no schedule other than the rate's.
With projections z of V crops of an image:

  loss = (1 - share) prediction + share SIGReg
  prediction = mean of (z - the mean of z over the image's global crops)^2
  SIGReg = mean over crops and random directions a, |a| = 1, of B times the
    integral of |mean of exp(i t a.z) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) over t

The mean in SIGReg and the batch norms of the projector are over all B images of
the batch, on any mesh.

Run, in examples/: vit-jax train --config=lejepa.py --workdir=runs/lejepa
The argument is a folder with a folder of images for each class, by which k-NN
scores the features; without it the letters of `glyphs`.
Size: the defaults of `LeJEPA` are those of the source (1,024 directions: its
README). The config is far smaller: a Ti/8 of width 128 and 4 blocks, crops of
96 and 48 px (letters: 32 and 16 px), projector 512, 512, 16. It has 256
directions, as MINIMAL.md.
Result: this config is not yet run. Its network with the projector of the
source, 1,024 directions, and crops of 32 and 16 px, on 20,000 photographs, 5
epochs: k-NN 30.5 -> 37.3 % (docs/tasks/unlabelled.md). On glyphs, 400 steps
with crops and no colours: SIGReg falls from 31 to 9, but k-NN from 15.7 to
9.1 %; crops of letters are few strokes.

Source: arXiv:2511.08544; rbalestr-lab/lejepa, MINIMAL.md: 17 points t in [0, 3]
  count twice, share 0.02, projector 2048, 2048, 16. Crops and colours are those
  of the paper's code: 2 of 224 px, 6 of 98 px.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.batch import View, normalise
from vit_jax.config import defaults
from vit_jax.data.preprocessing import image_size
from vit_jax.models import build
from vit_jax.models.posemb import LearnedOn
from vit_jax.objectives.objective import Learner, Objective
from vit_jax.options import AT_LEAST_0, AT_LEAST_1, SHARE, option

COLOURS = (
  "jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)|gaussian_blur(0.5)"
  "|solarize(0.2)"
)
GLOBAL = 2  # large crops of an image
POINTS, END = 17, 3.0  # of the integral, from 0; the other half is equal


@dataclasses.dataclass(frozen=True)
class LeJEPA(Objective):
  """Agreement of crops, with a normal distribution of their projections."""

  share: float = option(0.02, "share of SIGReg in the loss", limit=SHARE)
  directions: int = option(1024, "directions in a step", limit=AT_LEAST_1)
  hidden: int = option(2048, "width of the projector", limit=AT_LEAST_1)
  width: int = option(16, "width of a projection", limit=AT_LEAST_1)
  local_crops: int = option(6, "small crops of an image", limit=AT_LEAST_0)
  local_ops: str = option(
    f"decode|random_resized_crop(98, 0.05, 0.3)|flip_lr|{COLOURS}",
    "preprocessing of small crops",
  )

  trains_head = False  # no logits of the data's classes
  own = "lejepa/"

  def views(self, ops):
    views = {"global": View(ops, GLOBAL)}
    if self.local_crops:
      views["local"] = View(self.local_ops, self.local_crops)
    return views

  def make(self, model, run_shape, models):
    widths = self.hidden, self.hidden, self.width
    # Small crops have fewer patches than a learned table of positions.
    table = LearnedOn(model.grid(run_shape.image_size), "bicubic")
    module = Network(build(model, 0), widths, table)

    def vectors(params, crops, records, key):
      """Returns the vectors of crops [b, v, h, w, c], float32 [b, v, d]."""
      num = crops.shape[1]
      x = module.apply(
        {"params": params},
        normalise(crops.reshape(-1, *crops.shape[2:])),
        (records[:, None] * num + jnp.arange(num)[None]).ravel(),
        rngs={"dropout": key},
        method="vectors",
      )
      return x.astype(jnp.float32).reshape(len(crops), num, -1)

    def loss(params, batch, rng, step, over):
      mask = batch["mask"].astype(jnp.float32)
      count, mean = jnp.sum(mask), lambda x: over.mean(x, mask)
      x = [
        vectors(params, batch[name], batch["index"], jax.random.fold_in(rng, i))
        for i, name in enumerate(self.views(""))
      ]
      z = module.apply(
        {"params": params}, jnp.concatenate(x, 1), mean, method="project"
      )
      # The key is the step's, so all devices draw the same directions.
      key = jax.random.fold_in(rng, len(x))
      directions = jax.random.normal(key, (self.width, self.directions))
      errors, normality = terms(z, directions, mean, over.sum(mask))
      error = jnp.sum(errors * mask)
      total = (1 - self.share) * error + self.share * normality * count
      named = {
        "prediction": (error, count),
        "sigreg": (normality * count, count),
      }
      return total, count, named

    flops = GLOBAL * model.train_flops(run_shape.image_size, 0)
    if self.local_crops:
      small = model.train_flops(image_size(self.local_ops), 0)
      flops += self.local_crops * small
    return Learner(module, loss, train_flops=float(flops), whole_batch=True)


def terms(z, directions, mean, count):
  """Returns the prediction's error of each image, float32 [b], and SIGReg.

  Args:
    z: Projections [b, v, d]; the first `GLOBAL` of v are of global crops.
    directions: [d, k], of any length.
    mean: Returns the mean over all rows of the batch, [b, ...] -> [...].
    count: Number of rows of the batch.
  """
  centre = z[:, :GLOBAL].mean(1, keepdims=True)
  errors = jnp.square(z - centre).mean((1, 2))
  directions /= jnp.linalg.norm(directions, axis=0, keepdims=True)
  t = jnp.linspace(0.0, END, POINTS)
  normal = jnp.exp(-jnp.square(t) / 2)
  weights = 2 * END / (POINTS - 1) * normal  # of the trapezoidal rule, twice
  weights = weights.at[jnp.array([0, -1])].divide(2)
  angles = (z @ directions)[..., None] * t[None, None, None]
  real, imaginary = mean(jnp.cos(angles)), mean(jnp.sin(angles))  # [v, k, t]
  distance = jnp.square(real - normal[None, None]) + jnp.square(imaginary)
  return errors, count * (distance @ weights).mean()


class Projector(nn.Module):
  """Dense layers with batch norm; `mean` is that over the whole batch."""

  widths: tuple

  @nn.compact
  def __call__(self, x, mean):
    for i, width in enumerate(self.widths[:-1]):
      x = nn.Dense(width)(x)
      x -= mean(x.mean(1))[None, None]
      x /= jnp.sqrt(mean(jnp.square(x).mean(1)) + 1e-5)[None, None]
      scale = self.param(f"scale_{i}", nn.initializers.ones, (width,))
      bias = self.param(f"bias_{i}", nn.initializers.zeros, (width,))
      x = nn.relu(x * scale[None, None] + bias[None, None])
    return nn.Dense(self.widths[-1])(x)


class Network(nn.Module):
  """A network, whose parameters are at the root, with a projector."""

  network: nn.Module
  widths: tuple
  table: LearnedOn

  def setup(self):
    nn.share_scope(self, self.network)
    self.lejepa = Projector(self.widths)

  def __call__(self, images, **options):
    logits, out = self.network(images, **options)
    if self.is_initializing():
      self.project(out["pre_logits"][:, None], lambda x: x.mean(0))
    return logits, out

  def vectors(self, images, records):
    tokens, _ = self.network.embed(images)
    encoded, _ = self.network.encode(tokens, records, table=self.table)
    return self.network.pool(encoded)

  def project(self, x, mean):
    """Returns the projections of vectors [b, v, d]."""
    return self.lejepa(x, mean)


def get_config(folder=""):
  c = defaults()
  c.objective.kind = "lejepa:LeJEPA"
  c.model.variant, c.model.pool, c.model.posemb = "Ti/8", "gap", "sincos2d"
  c.model.width, c.model.depth = 128, 4
  c.model.mlp_dim, c.model.num_heads = 512, 4
  c.objective.hidden, c.objective.directions = 512, 256
  if folder:
    size, small, flip = 96, 48, "|flip_lr|"
    c.data.dataset, c.data.split = f"folder:{folder}", "train"
  else:
    size, small, flip = 32, 16, "|"  # a letter's mirror image is no letter
    c.data.dataset, c.data.split = "glyphs/size=32,count=20000,seed=0", "train"
  crop = "decode|random_resized_crop"
  c.data.ops = f"{crop}({size}, 0.3, 1.0){flip}{COLOURS}"
  c.objective.local_ops = f"{crop}({small}, 0.05, 0.3){flip}{COLOURS}"
  c.data.batch_size, c.total_steps = 128, 1500
  c.optim.lr, c.optim.warmup_steps, c.optim.weight_decay = 2e-3, 100, 0.05
  c.checkpoint.every_steps = 500
  c.evals = {
    "knn": {
      "kind": "knn",
      "train_split": "train",
      "split": "val" if folder else "validation",
      "ops": f"decode|resize({size})",
      "every_steps": 500,
    }
  }
  return c
