"""Every option of a run: its type, its default, its unit.

`vit_jax.config.parse` makes a frozen `Config` of a config file; the rest of the
program sees nothing else. Neither jax nor TensorFlow is imported, so that a
misspelt option is reported at once.
"""

import contextlib
import dataclasses
import math

from vit_jax.config.preprocessing import MAX_PIXELS
from vit_jax.evaluators import EvaluatorConfig
from vit_jax.families import FAMILIES, ModelConfig, ViTConfig
from vit_jax.objectives import OBJECTIVES, Classification, Objective
from vit_jax.options import option


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The training data."""

  dataset: str = option(
    "imagenet2012", "TFDS name (cifar10, glyphs/...), folder:/path or vtab:TASK"
  )
  split: str = option(
    "train", "split to train on; also train[:99%], train@2000, train@10%/seed=1"
  )
  data_dir: str | None = option(
    None,
    "folder of TFDS data, if on another disk or in a bucket; None:"
    " $TFDS_DATA_DIR or ~/tensorflow_datasets",
  )
  ops: str = option(
    "decode_inception_crop(224)|flip_lr",
    "preprocessing of an image, operations separated by |",
  )
  background: str | None = option(
    None,
    "colour behind transparent images, in training, evaluation and predict:"
    " white, black, '#ff8800'; None: white where nothing is visible, colours"
    " without alpha elsewhere",
  )
  max_pixels: int = option(
    MAX_PIXELS, "height x width of the largest image; larger ones are not read"
  )
  batch_size: int = option(4096, "images per step, over all devices")
  repeats: int = option(
    1,
    "copies of an image in a batch, each augmented by itself (repeated"
    " augmentation); epochs count rows: with 3 copies, an epoch has a third of"
    " the images",
  )
  shuffle_buffer: int = option(
    50_000,
    "encoded records in memory to shuffle streamed files, over all processes;"
    " fewer where memory is short: ImageNet's take 110 kB each",
  )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimizer and its schedule."""

  name: str = option(
    "adamw",
    "update rule",
    {
      "adamw": "Adam with decoupled weight decay",
      "sgd": "gradient descent with momentum",
      "lamb": "adamw, each kernel's update made as long as lr times the kernel"
      " (DeiT III)",
      "lion": "sign of the accumulator; decays beta1 and 0.99. Its lr is a"
      " third to a tenth of adamw's, its weight_decay as much larger",
      "adafactor": "adamw's second moment, from means of rows and columns, then"
      " momentum; as in big_vision",
      "muon": "orthogonalised momentum (0.95) for kernels of attention and MLP;"
      " adamw for all others. lr and weight_decay as for adamw",
    },
  )
  lr: float = option(1e-3, "peak learning rate, per step")
  schedule: str = option(
    "cosine",
    "learning rate after the warm-up",
    {
      "cosine": "half a cosine from lr to end_lr",
      "linear": "a straight line from lr to end_lr",
      "rsqrt": "lr / sqrt(1 + steps since / 10,000)",
      "constant": "lr",
      "step": "lr, divided by 10 at each of decay_at",
    },
  )
  warmup_steps: int = option(0, "steps of linear rise from 0 to lr")
  end_lr: float = option(
    0.0,
    "learning rate that would follow the last step's (cosine and linear)",
  )
  decay_at: tuple[float, ...] = option(
    (), "shares of the run, warm-up included, at which step divides, 0 to 1"
  )
  weight_decay: float = option(
    0.0, "decay of kernels per step, multiplied by the learning rate"
  )
  beta1: float = option(
    0.9,
    "adamw, lamb, muon: decay of the first moment; lion: share of the"
    " accumulator; recipes of others set it",
  )
  beta2: float = option(
    0.999,
    "adamw, lamb, muon: decay of the second moment; adafactor: its highest",
  )
  momentum: float = option(0.9, "sgd, adafactor: decay of the accumulator")
  accumulator_dtype: str = option(
    "float32",
    "type of the accumulator, or of the first moment",
    {
      "float32": "24 bits of mantissa",
      "bfloat16": "8 bits of mantissa, the range of float32",
    },
  )
  clip_norm: float | None = option(
    None, "largest global norm of the gradient; None: no clipping"
  )
  freeze: tuple[str, ...] = option(
    (),
    "parameters that stay as they are: patterns of their paths, such as"
    " embedding/*,Transformer/encoderblock_?/*",
  )
  layer_decay: float | None = option(
    None,
    "the rate of a layer divided by that of the layer above it, above 0 to 1."
    " Layer 0: patch embedding, class token, registers, positions; 1 to L: the"
    " blocks; L + 1, at the full rate: norm, pooling, head. MAE's ViT-L: 0.75."
    " None: 1",
  )
  lr_scale: tuple[str, ...] = option(
    (),
    "factors of the rates of some parameters: PATTERN=FACTOR, patterns as in"
    " freeze, such as head/*=10,embedding/*=0.2; all that match are multiplied",
  )
  microbatch: int | None = option(
    None,
    "most images that a device computes at once, to save memory; it sums the"
    " gradients of these microbatches. A TPU v5e takes fewer where that is"
    " faster. None: all",
  )
  ema_decay: float | None = option(
    None,
    "decay per step of the averaged parameters; it rises to this value as"
    " (1 + step) / (10 + step); None: no average",
  )

  def lr_scales(self) -> tuple[tuple[str, float], ...]:
    """Returns the patterns and factors of lr_scale.

    Raises:
      ValueError: One has another form, or is no factor above 0.
    """
    return tuple(map(_pattern_and_factor, self.lr_scale))


def _pattern_and_factor(text: str) -> tuple[str, float]:
  pattern, _, factor = text.rpartition("=")
  with contextlib.suppress(ValueError):
    if pattern and 0 < float(factor) < math.inf:
      return pattern, float(factor)
  raise ValueError(
    f"got {text!r}, expected PATTERN=FACTOR, a factor above 0, such as"
    " head/*=10; config.optim.freeze has what is not trained."
  )


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """Low-rank adapters: they and the head are trained, the rest is frozen."""

  rank: int = option(0, "columns of a factor; 0: no adapters")
  alpha: float | None = option(
    None, "the adapters' products are multiplied by alpha / rank; None: by 1"
  )
  targets: tuple[str, ...] = option(
    ("query", "value"),
    "linear maps of the blocks that get adapters",
    {
      "query": "of attention",
      "key": "of attention",
      "value": "of attention",
      "out": "behind attention",
      "Dense_0": "first of the MLP",
      "Dense_1": "last of the MLP",
      "Gate": "of a SwiGLU",
    },
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How devices are arranged; the product is the number of devices."""

  data: int = option(-1, "copies of the model; -1: all remaining devices")
  fsdp: int = option(
    1,
    "devices that share the state, and split the batch; -1 beside data=-1: up"
    " to 16 that divide the devices",
  )
  tensor: int = option(
    1,
    "devices that split heads and hidden units, if images of a device are too"
    " few to split further",
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the state is written, and which checkpoints stay."""

  every_steps: int = option(1000, "steps between checkpoints; 0: only the last")
  keep_last: int = option(
    2, "newest checkpoints that stay; more, to go back further"
  )
  keep_every_steps: int | None = option(
    None,
    "steps between checkpoints that stay for good: the first at or after each"
    " multiple; None: none",
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  seed: int = option(0, "root of all randomness")
  total_steps: int | None = option(
    None, "length of the run in steps; None: total_epochs decides"
  )
  total_epochs: float | None = option(
    None, "length of the run in passes over data.split"
  )
  num_classes: int | None = option(
    None,
    "width of the head, if it is to be wider than the data set has classes, or"
    " their number is not known without the data; None: the data set's",
  )
  init: str | None = option(
    None, "weights to start from: anything that vit_jax.load reads"
  )
  init_head: str = option(
    "zeros",
    "the head before the first step, where init has none for these classes",
    {
      "zeros": "zeros",
      "linear_probe": "ridge regression on the frozen features of data.split;"
      " the evaluator `val` chooses its penalty, and scores it as step 0",
    },
  )
  init_mean: str | None = option(
    None,
    "how the images of init's training were normalised, if its file does not"
    " state it: imagenet (DINO, MAE, DeiT), clip, half ([-1, 1]), or MEAN/STD,"
    " one number each or three with commas, of pixels in [0, 1]; None: as the"
    " file states, or half",
  )
  log_steps: int = option(50, "steps between lines of metrics")
  on_nonfinite: str = option(
    "stop",
    "a step whose loss or gradient is NaN or infinite; its update is never"
    " applied",
    {
      "stop": "the run stops within log_steps, before a checkpoint",
      "skip": "the run goes on without the step, if nobody is there to look",
    },
  )
  trackers: tuple[str, ...] = option(
    (),
    "services that get the metrics, too, as their own environment variables"
    " say; comma-separated",
    {
      "wandb": "Weights & Biases",
      "mlflow": "MLflow",
    },
  )
  fake_data: bool = option(
    False, "fake records of the data set's form, to try a run without its data"
  )
  fewshot: str = option(
    "required",
    "data sets of few-shot evaluators that are not on disk",
    {
      "required": "refused, with the commands that prepare them, so that no run"
      " of weeks lacks its score",
      "available": "left out with a note; the means are then over fewer sets",
    },
  )
  watchdog_seconds: float = option(
    3600.0,
    "seconds without progress (a new phase, a step, a batch of an evaluation)"
    " after which a process is ended; longer than the first compilation; 0: no"
    " limit",
  )
  heartbeat_timeout_seconds: int = option(
    30,
    "seconds after which jax ends the other processes of a run if one is dead"
    " or suspended",
  )
  model: ModelConfig = ViTConfig()
  objective: Objective = Classification()
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  lora: LoRAConfig = LoRAConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  evals: tuple[EvaluatorConfig, ...] = ()

  @property
  def is_partial(self) -> bool:
    """Whether a part of the parameters is frozen; the step then has fewer
    products than `ModelConfig.train_flops` counts."""
    return bool(self.optim.freeze or self.lora.rank)


# The evaluator whose images are held out of the training data, to choose by.
HELD_OUT = "val"
# Sections of several kinds: the option that chooses one, and kind -> class.
UNIONS = {"model": ("name", FAMILIES), "objective": ("kind", OBJECTIVES)}
