"""Your own images, on one machine; the CPU of a laptop is enough.

Run: vit-jax train --workdir=runs/mine \
  --config=folder:path=/path/to/images,init=ViT.npz
Arguments: path (a folder with one sub-folder per class, or with the folders
train, val and test, which have the sub-folders; a CSV with image files and
labels; a parquet file, or a folder of them; or a name that vit-jax prepare or
TFDS knows), init (anything that vit_jax.load reads; without it a small ViT is
trained from scratch, which needs many more images and steps), model (any that
vit-jax models prints; by default that of init, or Ti/16), res (pixels, a
multiple of the patch; by default that of init's training, or 128), budget (of
the trials: 10m, 90s, or the steps of all trials; by default 5m; 0: no trials).
For a CSV or parquet file also: labels (the column of the classes, or columns
with a 0 or 1 for each class: labels=cat,dog), numbers (columns to predict:
numbers=age), image (the column of the images). For them and for a folder: group
(a column, or for a folder a regular expression for a part of the files' names;
images with the same value are on one side of every split).

With init, a linear probe is fitted to the features of the pre-trained model,
and fine-tuning starts from it. Before that, short trials within the budget
compare augmentations, learning rates and trained parts of the model, see
`vit_jax.finetune.trials`. An option that the command line sets is not tried. At
the end, `val` chooses what is saved: the fine-tuned model, the probe, or a mean
of their parameters.
If an image has several classes, or numbers to predict, there is no probe and
there are no trials. Images with numbers are not augmented, because a crop
changes positions and a mirror changes directions; if augmentation does not
change your numbers, add |flip_lr or |pad(PIXELS)|random_crop(SIZE) to
config.data.ops.
The test split is scored once, at the end: `test`, or else `val`, or else a
tenth of `train`. Held-out images decide all else: `val`, if it is not the test
split, or else a tenth of `train` (a fifth, if it has fewer than 1,000 images).
Model and numerics are those of init. Batch and length depend on the number of
images (--config.total_epochs=3 --config.optim.warmup_steps=20 is shorter).
Cost, defaults and results: docs/tasks/finetune.md.
"""

import dataclasses
import functools
import glob
import math
import os

from vit_jax.config import arguments, defaults, whole_number
from vit_jax.families import family
from vit_jax.finetune import trial_candidates

ARGUMENTS = {
  **{"path": "", "labels": "", "numbers": "", "group": "", "image": ""},
  **{"init": "", "model": "", "res": "", "budget": "5m"},
}
TABLES = {".csv": "csv:", ".tsv": "csv:", ".parquet": "parquet:"}
PREFIXES = ("folder:", "csv:", "parquet:")


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  dataset = _dataset(args)
  res = whole_number(args, "res") if args["res"] else None
  trial_candidates.check_budget(args["budget"])
  # Only here, since they take seconds to import.
  from vit_jax import weights
  from vit_jax.data import sources, splits

  opened = sources.Sources()

  # A small set holds out more: 10 of 100 images are too few to compare
  # options by.
  few = opened.inspect(dataset, "train").num_examples < 1000
  share = "80%" if few else "90%"
  train, val, test = opened.train_val_test(dataset, share)
  try:
    for split in (train, val, test):
      opened.inspect(dataset, split)
  except splits.SplitError:
    raise ValueError(
      f"path: got {opened.inspect(dataset, 'train').num_examples:,} images to"
      f" learn from in {args['path']}, too few to hold some out for a test and"
      " some to choose by; expected 5 or more of every class, or folders"
      " train, val and test in it."
    ) from None
  source = opened.inspect(dataset, train)
  num_images = source.num_examples
  has_classes = not (source.is_regression or source.is_multilabel)

  c = defaults()
  if args["init"]:
    try:
      init = weights.read_shapes(args["init"])
    except FileNotFoundError as e:
      raise ValueError(f"init: {e}") from None
    model = weights.model_to_finetune(init)
    c.init = args["init"]
    options = dataclasses.asdict(model)
    c.model.update({k: v for k, v in options.items() if v is not None})
    if args["model"] and args["model"] != c.model.variant:
      raise ValueError(
        f"model: got {args['model']}, but {args['init']} is {c.model.variant};"
        " leave one of them out."
      )
    height, width = weights.trained_at(init)
    is_small = hasattr(model, "size") and model.size.width < 384
    if has_classes:
      c.init_head = "linear_probe"
      c.optim.name = "sgd"  # as Table 4 of arXiv:2010.11929
      # Measured: docs/tasks/finetune.md (width 128), docs/tasks/transfer.md
      # (384, where 0.03 spoils the features).
      c.optim.lr = 0.03 if is_small else 0.003
      # With a small model, 60 passes left 2.4 and 2.5 % errors on MNIST (two
      # seeds), and 40 passes 2.5 and 3.0 %.
      most = 60 if is_small else 40
    else:
      c.optim.name, c.optim.lr, c.optim.weight_decay = "adamw", 3e-4, 0.1
      most = 20
    # 200,000 images in all, but 5 passes at least.
    num_epochs = min(most, max(5, 200_000 // num_images))
  else:
    c.model.variant = args["model"] or "Ti/16"
    c.model.name = family(c.model.variant)
    if c.model.name == "vit":
      c.model.pool, c.model.posemb = "gap", "sincos2d"
    height = width = 128
    num_epochs = 100
    c.optim.lr = 1e-3
    c.optim.weight_decay = 0.1
  if res:
    height = width = res
  size = height if height == width else (height, width)

  c.data.dataset, c.data.split = dataset, train
  whole = f"decode|resize({size})"
  if source.is_regression:
    c.data.ops = whole
  elif args["init"] or sources.typical_side(source) < trial_candidates.SMALL:
    c.data.ops = trial_candidates.pad_and_crop(size)
  else:
    c.data.ops = f"decode_inception_crop({size})|flip_lr"
  # Crops and shifts of large photographs then cost what those of small ones do.
  c.data.shrink = max(256, 2 * height, 2 * width)
  # 50 to 100 steps an epoch, as far as 8 to 128 images a step allow.
  batch = 2 ** int(math.log2(num_images / 50)) if num_images > 50 else 1
  c.data.batch_size = min(128, max(8, batch))
  epoch = math.ceil(num_images / c.data.batch_size)
  c.total_steps = num_epochs * epoch
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = c.total_steps // 10
  c.optim.clip_norm = 1.0
  c.optim.microbatch = 16  # so that a larger batch takes no more memory

  c.log_steps = max(1, epoch // 5)
  # At most 30 times: 56 evaluations and checkpoints of MNIST took 23 s.
  every_steps = epoch * math.ceil(num_epochs / 30)
  c.checkpoint.every_steps = every_steps
  kinds = "per_class", "classification"  # of `test` and `val`
  if source.is_regression:
    c.objective = {"kind": "regression"}
    kinds = "regression", "regression"
  elif source.is_multilabel:
    c.objective.loss = "sigmoid"
    kinds = "multilabel", "multilabel"
  score = {"ops": whole}
  c.evals = {
    "test": {**score, "kind": kinds[0], "split": test},
    "val": {
      **score,
      "kind": kinds[1],
      "split": val,
      "every_steps": every_steps,
    },
  }
  return c


def _dataset(args: dict[str, str]) -> str:
  """Returns the name of the data set, with its options.

  Raises:
    ValueError: There is no path, or an option that its data set does not have.
  """
  path = args["path"]
  if not path:
    raise ValueError("got no path, expected path=/path/to/images.")
  where = os.path.expanduser(path)
  prefix = TABLES.get(os.path.splitext(path)[1].lower(), "")
  if stated := next((p for p in PREFIXES if path.startswith(p)), None):
    prefix, path = stated, path.removeprefix(stated)
  elif os.path.isdir(where):
    has_parquet = glob.glob(f"{glob.escape(where)}/*.parquet")
    has_parquet += glob.glob(f"{glob.escape(where)}/*/*.parquet")
    prefix = "parquet:" if has_parquet else "folder:"
  elif path.startswith(("/", ".", "~")) and not (prefix and glob.glob(where)):
    raise ValueError(f"path: got {path}, which does not exist.")
  names = ("labels", "numbers", "group", "image")
  options = [f"{name}={args[name]}" for name in names if args[name]]
  if options and not prefix:
    raise ValueError(
      f"{options[0].replace('=', ': got ', 1)}, expected none for {path}, which"
      " is no folder, CSV or parquet file."
    )
  return f"{prefix}{path}{'?' * bool(options)}{'&'.join(options)}"


def get_trials(arg: str = ""):
  """What vit-jax train tries first, and the budget of it."""
  args = arguments(arg, ARGUMENTS)
  if not args["init"] or args["budget"] == "0":
    return None, "0"
  from vit_jax.data import sources

  source = sources.Sources().inspect(_dataset(args), "train")
  if source.is_regression or source.is_multilabel:
    return None, "0"
  from vit_jax.finetune import trials

  rounds = functools.partial(trials.rounds_of, has_size=bool(args["res"]))
  return rounds, args["budget"]
