"""Every option of a run: type, default and unit.

`vit_jax.config.parse` makes a frozen `Config` from a config file; the rest of
the program uses only the `Config`. This module imports neither jax nor
TensorFlow, so that a misspelt option is reported at once.
"""

import contextlib
import dataclasses
import math

from vit_jax.batch import View
from vit_jax.data.data_config import DataConfig
from vit_jax.data.preprocessing import view_shapes
from vit_jax.evaluators import EvaluatorConfig
from vit_jax.families import FAMILIES, ModelConfig, ViTConfig
from vit_jax.objectives import OBJECTIVES, Classification, Objective
from vit_jax.options import (
  ABOVE_0,
  AT_LEAST_0,
  AT_LEAST_1,
  Limit,
  option,
)

# float32 rounds larger decays to 1: nothing would be learned.
DECAY = Limit("0 to below 1 (float32)", lambda x: 0 <= x < 1 - 2**-25)
FACTOR = Limit("a factor above 0 and up to 1", lambda x: 0 < x <= 1)
DEVICES = Limit(
  "a number of devices, or -1 for all remaining devices",
  lambda x: x == -1 or x >= 1,
)
# jax draws from the last 32 bits, so that larger seeds repeat smaller ones.
SEED = Limit(f"0 to {2**32 - 1:,}", lambda x: 0 <= x < 2**32)

EACH = "each"  # in OptimConfig.clip_groups


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimizer and its schedule."""

  name: str = option(
    "adamw",
    "update rule; or the import path of a function that returns an optax"
    " transformation, with arguments in brackets if needed, such as"
    " optax:contrib.ademamix(b3=0.999). Its learning_rate and weight_decay are"
    " those of the run",
    {
      "adamw": "Adam with decoupled weight decay",
      "sgd": "gradient descent with momentum",
      "lamb": "adamw, with each kernel's update scaled to lr times the norm of"
      " the kernel; query, key and value are one (DeiT III)",
      "lion": "sign of the accumulator; decays beta1 and 0.99. Choose lr 3 to"
      " 10 times lower than for adamw, and weight_decay as much higher",
      "adafactor": "second moment from the means of rows and columns, and"
      " momentum; as in big_vision",
      "muon": "orthogonalised momentum (0.95) for kernels of attention and MLP;"
      " adamw for all others. lr and weight_decay as for adamw",
    },
    is_open=True,
  )
  lr: float = option(1e-3, "peak learning rate", limit=ABOVE_0)
  schedule: str = option(
    "cosine",
    "learning rate after the warm-up; or the import path of a function of lr,"
    " warmup_steps and total_steps, with further arguments in brackets if"
    " needed, which returns a schedule as optax's, with the warm-up",
    {
      "cosine": "half a cosine from lr to end_lr",
      "linear": "a straight line from lr to end_lr",
      "rsqrt": "lr / sqrt(1 + s / 10,000), s steps after the warm-up",
      "constant": "lr",
      "step": "lr, divided by 10 at each of decay_at",
    },
    is_open=True,
  )
  warmup_steps: int = option(
    0,
    "steps in which the learning rate rises linearly from 0 to lr",
    limit=AT_LEAST_0,
  )
  end_lr: float = option(
    0.0, "cosine, linear: learning rate after the last step", limit=AT_LEAST_0
  )
  decay_at: tuple[float, ...] = option(
    (),
    "schedule=step: points at which the learning rate is divided by 10, as"
    " shares of all steps, 0 to 1",
  )
  weight_decay: float = option(
    0.0,
    "decay of kernels per step, multiplied by the learning rate",
    limit=AT_LEAST_0,
  )
  weight_decay_end: float | None = option(
    None,
    "weight decay after the last step; it moves from weight_decay along half a"
    " cosine over the whole run. DINO: 0.04 to 0.4. None: constant",
    limit=AT_LEAST_0,
  )
  beta1: float = option(
    0.9,
    "adamw, lamb, muon: decay of the first moment (optax's b1, the first of"
    " timm's --opt-betas); lion: weight of the accumulator in the update",
    limit=DECAY,
  )
  beta2: float = option(
    0.999,
    "adamw, lamb, muon: decay of the second moment; adafactor: the largest"
    " decay of the second moment",
    limit=DECAY,
  )
  momentum: float = option(
    0.9, "sgd, adafactor: decay of the accumulator", limit=DECAY
  )
  accumulator_dtype: str = option(
    "float32",
    "type of the momentum or of the first moment",
    {
      "float32": "24 bits of mantissa",
      "bfloat16": "8 bits of mantissa, the range of float32",
    },
  )
  clip_norm: float | None = option(
    None,
    "largest global norm of the gradient; None: no clipping",
    limit=ABOVE_0,
  )
  clip_groups: tuple[str, ...] = option(
    (),
    "groups of parameters whose gradients clip_norm clips by the norm of their"
    " group: patterns as in freeze, each one group, which has the parameters"
    " that no earlier pattern matches; all others are a group, too. each: every"
    " array by its own norm (DINO). None: one norm of all",
  )
  freeze: tuple[str, ...] = option(
    (),
    "parameters that are not trained: patterns of their paths, such as"
    " embedding/*,Transformer/encoderblock_?/*. The frozen blocks before the"
    " first trained block are computed only once for each image if data.ops has"
    " no random operation except a flip_lr at the end",
  )
  layer_decay: float | None = option(
    None,
    "learning rate of each layer divided by that of the next layer, above 0 and"
    " up to 1. Layer 0 is patch embedding, class token, registers and"
    " positions; 1 to L are the blocks; L + 1 is norm, pooling and head, with"
    " the full rate. MAE's ViT-L: 0.75. None: 1",
    limit=FACTOR,
  )
  lr_scale: tuple[str, ...] = option(
    (),
    "factors of the learning rates of some parameters, such as"
    " head/*=10,embedding/*=0.2; patterns as in freeze. If several patterns"
    " match a parameter, their factors are multiplied",
  )
  lr_zero: tuple[str, ...] = option(
    (),
    "first steps in which some parameters have the learning rate 0, such as"
    " dino/prototypes/*=1251; patterns as in freeze",
  )
  microbatch: int | None = option(
    None,
    "largest number of images that a device computes at once, to save memory;"
    " the gradients of these microbatches are summed. On a TPU v5e smaller"
    " microbatches are used if they are faster. None: all images",
    limit=AT_LEAST_1,
  )
  ema_decay: float | None = option(
    None,
    "decay per step of the moving average of the parameters; at first it is"
    " (1 + step) / (10 + step), if that is less; None: no average",
    limit=DECAY,
  )

  def lr_scales(self) -> tuple[tuple[str, float], ...]:
    """Returns the (pattern, factor) pairs of lr_scale.

    Raises:
      ValueError: A text is not PATTERN=FACTOR with a factor above 0.
    """
    return tuple(map(_pattern_and_factor, self.lr_scale))

  def lr_zeros(self) -> tuple[tuple[str, int], ...]:
    """Returns the (pattern, steps) pairs of lr_zero.

    Raises:
      ValueError: A text is not PATTERN=STEPS with a whole number above 0.
    """
    return tuple(map(_pattern_and_steps, self.lr_zero))


# Options of OptimConfig that only some choices of another option read.
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
  "beta1": ("name", ("adamw", "lamb", "lion", "muon")),
  "beta2": ("name", ("adamw", "lamb", "adafactor", "muon")),
  "momentum": ("name", ("sgd", "adafactor")),
  "accumulator_dtype": (
    "name",
    ("adamw", "sgd", "lamb", "lion", "adafactor", "muon"),
  ),
  "end_lr": ("schedule", ("cosine", "linear")),
}


def _pattern_and_factor(text: str) -> tuple[str, float]:
  pattern, _, factor = text.rpartition("=")
  with contextlib.suppress(ValueError):
    if pattern and 0 < float(factor) < math.inf:
      return pattern, float(factor)
  expected = "PATTERN=FACTOR, above 0; see also config.optim.freeze"
  raise ValueError(f"got {text!r}, expected {expected}.")


def _pattern_and_steps(text: str) -> tuple[str, int]:
  pattern, _, steps = text.rpartition("=")
  if pattern and steps.isdecimal() and int(steps):
    return pattern, int(steps)
  expected = "PATTERN=STEPS, a whole number above 0; see config.optim.freeze"
  raise ValueError(f"got {text!r}, expected {expected}.")


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """Low-rank adapters: only the adapters and the head are trained."""

  rank: int = option(
    0, "rank of the adapters; 0: no adapters", limit=AT_LEAST_0
  )
  alpha: float | None = option(
    None,
    "the adapters' output is multiplied by alpha / rank; None: by 1",
    limit=ABOVE_0,
  )
  targets: tuple[str, ...] = option(
    ("query", "value"),
    "linear maps of the blocks that get adapters, by their names in the"
    " family: query, key, value, out (attention), Dense_0, Dense_1 (first and"
    " last layer of the MLP), Gate (of a SwiGLU)",
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How devices are arranged; the product is the number of devices."""

  data: int = option(
    -1, "copies of the model; -1: all remaining devices", limit=DEVICES
  )
  fsdp: int = option(
    1,
    "devices that share the state and split the batch; -1 with data=-1: the"
    " largest divisor, up to 16, of the devices of a TPU slice or GPU node",
    limit=DEVICES,
  )
  tensor: int = option(
    1,
    "devices that split heads and hidden units; for batches that are too small"
    " to be split over all devices",
    limit=DEVICES,
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the state is written, and which checkpoints are kept."""

  every_steps: int = option(
    1000, "steps between checkpoints; 0: only the last", limit=AT_LEAST_0
  )
  keep_last: int = option(
    2,
    "number of newest checkpoints that are kept. 1 takes less disk, but if that"
    " checkpoint is damaged, there is no other",
    limit=AT_LEAST_1,
  )
  keep_every_steps: int | None = option(
    None,
    "steps between checkpoints that are never deleted: the first at or after"
    " each multiple; None: none",
    limit=AT_LEAST_1,
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  seed: int = option(0, "seed of all random numbers", limit=SEED)
  total_steps: int | None = option(
    None,
    "length of the run in steps; None: total_epochs decides",
    limit=AT_LEAST_1,
  )
  total_epochs: float | None = option(
    None, "length of the run in passes over data.split", limit=ABOVE_0
  )
  num_classes: int | None = option(
    None,
    "classes of the head; needed if the head has more classes than the data"
    " set, or if their number is unknown without the data; None: as in the data"
    " set",
    limit=AT_LEAST_1,
  )
  init: str | None = option(
    None, "weights to start from: anything that vit_jax.load reads"
  )
  init_head: str = option(
    "zeros",
    "head before the first step",
    {
      "zeros": "that of init if it is for these classes; otherwise its kernel"
      " is zero, its bias is model.head_bias",
      "linear_probe": "always a new one: ridge regression on the frozen"
      " features of data.split; the evaluator `val` chooses its penalty and"
      " scores it at step 0. After the last step, `val` chooses what is saved:"
      " the fine-tuned model, the probe, or a mean of their parameters",
    },
  )
  init_mean: str | None = option(
    None,
    "normalisation of init's training images, if its file does not state it:"
    " imagenet (DINO, MAE, DeiT), clip, half ([-1, 1]), or MEAN/STD of pixels"
    " in [0, 1], each as one number, or one for each channel with commas; None:"
    " as the file states, otherwise that of the publisher if the model is"
    " recognised, otherwise half",
  )
  log_steps: int = option(
    50, "steps between lines of metrics", limit=AT_LEAST_1
  )
  on_nonfinite: str = option(
    "stop",
    "what happens after a step whose loss or gradient is NaN or infinite; its"
    " update is never applied",
    {
      "stop": "the run stops within log_steps, before a checkpoint",
      "skip": "the run continues without the step",
    },
  )
  trackers: tuple[str, ...] = option(
    (),
    "services that also get the metrics, separated by commas; their own"
    " environment variables configure them",
    {"wandb": "Weights & Biases"},
    is_open=True,
  )
  callbacks: tuple[str, ...] = option(
    (),
    "callbacks of one's own, separated by commas: import paths, with keyword"
    " arguments in brackets, such as my_lab.monitor:Cosine(decay=0.9)",
  )
  fake_data: bool = option(
    False,
    "use fake records with the shapes of the data set, to try a run without"
    " data",
  )
  fewshot: str = option(
    "required",
    "what happens if the data set of a few-shot evaluator is not on disk",
    {
      "required": "the run is refused, with the commands that prepare the data"
      " sets",
      "available": "the evaluator is left out with a note; the means are then"
      " over fewer sets",
    },
  )
  watchdog_seconds: float = option(
    3600.0,
    "seconds without progress (a new phase, a step, a batch of an evaluation)"
    " after which a process ends itself; must be longer than the first"
    " compilation; 0: no limit",
    limit=AT_LEAST_0,
  )
  heartbeat_timeout_seconds: int = option(
    30,
    "seconds after which jax ends the other processes of a run if one is dead"
    " or suspended",
    limit=AT_LEAST_1,
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
  def views(self) -> dict[str, View]:
    """What a training batch has of each record, see `Objective.views`."""
    return self.data.views(self.objective)

  @property
  def view_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of what each view has of a record."""
    return view_shapes(self.views, self.model.channels)

  @property
  def is_partial(self) -> bool:
    """Whether some parameters are frozen.

    The step then has fewer products than `ModelConfig.train_flops` counts.
    """
    return bool(self.optim.freeze or self.lora.rank)


# Name of the evaluator that scores held-out training images, for choices.
HELD_OUT = "val"
# Sections of several kinds: the option that chooses one, and kind -> class.
UNIONS = {"model": ("name", FAMILIES), "objective": ("kind", OBJECTIVES)}
