"""What several config files share: their arguments, recipes of the paper."""

from collections.abc import Collection, Mapping

import ml_collections

from vit_jax.config import defaults
from vit_jax.families import family
from vit_jax.options import nearest

# Data set -> (split the shots are drawn from, split that is scored). They are
# big_vision's (configs/common_fewshot.py); at least 30 images of every class of
# ImageNet are among the first 65,000.
FEWSHOT = {
  "caltech101": ("train", "test"),
  "cars196": ("train", "test"),
  "cifar100": ("train", "test"),
  "dtd": ("train", "test"),
  "oxford_iiit_pet": ("train", "test"),
  "uc_merced": ("train[:1000]", "train[1000:]"),
  "imagenet2012": ("train[:65000]", "validation"),
}
DATASETS = ("imagenet2012", "imagenet21k")  # beside data of one's own
# Length of a comparison of models; configs/comparison.py has the reasons.
EPOCHS = {
  "imagenet21k": 30.0,  # 30 * 14,145,922 / 4096 = 103,608 steps
  "imagenet2012": 300.0,  # 300 * 1,281,167 / 4096 = 93,835 steps
}


def arguments(text: str, known: dict[str, str]) -> dict[str, str]:
  """Parses the argument of a config, "model=B/16,res=384".

  Args:
    text: The text after the colon.
    known: Name -> default.

  Raises:
    ValueError: A name is unknown.

  Example:
    >>> arguments("res=384", {"model": "B/16", "res": "224"})
    {'model': 'B/16', 'res': '384'}
  """
  values = dict(known)
  for part in text.split(",") if text else ():
    key, _, value = part.partition("=")
    if key not in known:
      raise ValueError(
        f"got argument {key!r}, expected {', '.join(known)}."
        + nearest(key, known)
      )
    values[key] = value
  return values


def check_choices(
  args: dict[str, str], choices: Mapping[str, Collection[str]]
) -> None:
  """Checks arguments that take one of several values.

  Args:
    args: As `arguments` returns them.
    choices: Name -> the values that it takes.

  Raises:
    ValueError: An argument has another value (with the nearest one).
  """
  for name, known in choices.items():
    if args[name] not in known:
      raise ValueError(
        f"got {name}={args[name]}, expected one of {', '.join(known)}."
        + nearest(args[name], known)
      )


def number(args: dict[str, str], name: str) -> float:
  """Returns an argument as a number above 0.

  Raises:
    ValueError: It is none.
  """
  try:
    found = float(args[name])
  except ValueError:
    found = 0.0
  if not 0 < found < float("inf"):
    raise ValueError(f"got {name}={args[name]}, expected a number above 0.")
  return found


def for_tpus(c: ml_collections.ConfigDict, microbatch: int) -> None:
  """Sets what makes a step fast on a TPU slice of any size, at equal results.

  Args:
    c: Config to be changed. The state is split over up to 16 chips.
    microbatch: Images of a microbatch on each device: as many as 16 GiB hold,
      if that is faster. The results are the same.

  Source: docs/performance_log.md.
  """
  c.mesh.fsdp = -1
  c.optim.microbatch = microbatch


def with_fewshot(c: ml_collections.ConfigDict) -> None:
  """Adds few-shot accuracy on seven data sets, and the mean over them.

  1, 5, 10 and 25 images a class, three draws, an L2 weight of 2^10, at 224 px,
  every 10,000 steps and at the end: `fewshot_<data set>/<k>shot`, and the mean
  `fewshot/<k>shot`. An evaluation passes about 153,000 images forward, which is
  the arithmetic of 12.5 steps of 4,096: an eighth of a percent of the run.
  Data sets that are not on disk are refused (config.fewshot).

  Args:
    c: The config, which is changed.

  Source: section 4.1 of arXiv:2010.11929, which states neither layer, L2 weight
  nor draws; for these big_vision's evaluators/fewshot_lsr.py (the layer is the
  input of the head, behind the tanh) and configs/common_fewshot.py.
  """
  evals = dict(c.evals or {})
  for dataset, (support, test) in FEWSHOT.items():
    evals[f"fewshot_{dataset}"] = {
      "kind": "fewshot",
      "dataset": dataset,
      "train_split": support,
      "split": test,
      "ops": "decode|resize(256)|central_crop(224)",
      "shots": (1, 5, 10, 25),
      "seeds": (0, 1, 2),
      "l2": (1024.0,),
      "every_steps": 10_000,
      "group": "fewshot",
    }
  c.evals = evals


def with_glyphs(c: ml_collections.ConfigDict) -> None:
  """Sets the demo's model, data, optimizer and few-shot score on digits.

  Args:
    c: The config, which is changed.
  """
  c.model.variant = "Ti/8"  # the patch; all sizes follow
  c.model.width, c.model.depth = 128, 4
  c.model.mlp_dim, c.model.num_heads = 512, 4
  c.model.pool = "gap"

  c.data.dataset = "glyphs/size=32,count=40000,seed=0"
  c.data.ops = "decode|resize(32)"
  c.data.batch_size = 64
  c.total_steps = 3600  # 3,600 * 64 / 40,000 = 5.8 epochs

  c.optim.lr = 1.5e-3
  c.optim.warmup_steps = 100
  c.optim.beta2 = 0.99
  c.optim.weight_decay = 0.1
  c.optim.clip_norm = 1.0

  c.checkpoint.every_steps = 600
  c.evals = {
    "fewshot": {
      "kind": "fewshot",
      "dataset": "digits",
      "ops": "decode|resize(32)",
      "l2": (16.0, 1024.0),
      "baselines": True,  # once, at the end: it is scored on test digits
    },
  }


def with_digits(c: ml_collections.ConfigDict) -> None:
  """Sets data, optimizer and scores of fine-tuning on digits, at 48 px.

  Args:
    c: The config, which is changed. Its model is not.
  """
  c.data.dataset, c.data.split = "digits", "train[:90%]"
  c.data.ops = "decode|resize(48)|pad(4)|random_crop(48)"
  c.data.batch_size = 96
  c.total_steps = 300  # 300 * 96 / 1,167 = 25 epochs

  c.optim.name = "sgd"
  c.optim.momentum = 0.9
  c.optim.lr = 0.06
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = 30
  c.optim.clip_norm = 1.0

  score = {"kind": "classification", "ops": "decode|resize(48)"}
  c.evals = {
    "digits": {**score, "split": "test"},  # once, at the end
    "val": {**score, "split": "train[90%:]", "every_steps": 50},
  }


def table3(variant: str, dataset: str) -> ml_collections.ConfigDict:
  """Pre-training at 224 px, batch 4096, 10,000 steps of warm-up, Adam.

  Args:
    variant: Such as "L/16".
    dataset: "imagenet2012" (300 epochs), "imagenet21k" (90 epochs), or
      data of one's own, "folder:/path": ImageNet's recipe with a batch of 512,
      a learning rate of 1e-3 and 500 steps of warm-up, since these are smaller
      (not published).

  Raises:
    ValueError: The data set is another.

  Source: Table 3; section 3.1 for the tanh layer; issue threads of
  google-research/vision_transformer for the loss (sigmoid, head bias -10) and
  the floor of 1e-5; clipping is stated for ImageNet alone. For ImageNet the
  paper does not state the loss; scenic's port of that recipe uses sigmoid. Nor
  how much label smoothing was found best: none here, which is scenic's default.
  """
  name, colon, _ = dataset.partition(":")  # then a path, or a version
  is_own = name not in DATASETS
  if is_own and not colon:
    raise ValueError(
      f"got data set {dataset!r}, expected {', '.join(DATASETS)} or"
      f" folder:/path.{nearest(name, DATASETS)}"
    )
  c = defaults()
  c.objective.loss = "sigmoid"
  c.model.variant = variant
  c.model.pre_logits = True
  c.model.head_bias = -10.0
  c.model.dropout = 0.1
  c.model.dtype = "bfloat16"
  c.data.batch_size = 4096
  c.data.ops = "decode_inception_crop(224)|flip_lr"
  # Others are the largest models, and ResNets, whose maps take the most memory.
  for_tpus(c, microbatch=64 if variant[0] in "BL" else 16)
  c.optim.warmup_steps = 10_000
  c.optim.end_lr = 1e-5
  c.checkpoint.every_steps = 1000
  c.checkpoint.keep_every_steps = 50_000
  evals = {"val": {"kind": "classification", "every_steps": 2500}}

  if name == "imagenet21k":
    # 21,843 classes; the images after the first 51,200 are trained on.
    c.data.dataset, c.data.split = "imagenet21k", "full[51200:]"
    evals["val"]["split"] = "full[25600:51200]"
    c.total_epochs = 90.0  # 90 * 14,145,922 / 4096 = 310,823 steps
    c.optim.lr = 1e-3
    c.optim.schedule = "linear"
    c.optim.weight_decay = 0.03
  else:
    c.data.dataset = dataset
    evals["val"]["split"] = "val" if is_own else "validation"
    c.total_epochs = 300.0  # 300 * 1,281,167 / 4096 = 93,835 steps
    c.optim.lr = 3e-3
    c.optim.schedule = "cosine"
    c.optim.weight_decay = 0.3
    c.optim.clip_norm = 1.0
  if is_own:
    c.data.batch_size = 512
    c.optim.lr = 1e-3
    c.optim.warmup_steps = 500
  c.evals = evals
  if not is_own:
    with_fewshot(c)
  return c


def on_equal_terms(
  variant: str, dataset: str, lr: float
) -> ml_collections.ConfigDict:
  """Pre-training as on JFT-300M in Table 3, for models to be compared.

  A linear decay, weight decay 0.1, no dropout, whatever the data set, which
  gives the length (of EPOCHS).

  Args:
    variant: Such as "L/16" or "R50x1".
    dataset: Of EPOCHS.
    lr: Peak learning rate of that model.
  """
  c = table3(variant, dataset)
  c.model.name = family(variant)
  c.model.pre_logits = family(variant) == "vit"
  c.model.dropout = 0.0
  c.total_epochs = EPOCHS[dataset]
  c.optim.lr = lr
  c.optim.schedule = "linear"
  c.optim.weight_decay = 0.1
  return c
