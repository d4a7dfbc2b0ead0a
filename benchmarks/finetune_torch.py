"""Fine-tuning in torch, with timm and peft, for `benchmarks/beside_peft.py`.

python benchmarks/finetune_torch.py WEIGHTS DATA --method=full [--res=42]
  [--batch=32] [--steps=96] [--warmup=10] [--seed=0]
python benchmarks/finetune_torch.py WEIGHTS DATA --beside=BACKBONE [--res=42]

WEIGHTS: a ViT-S/14 of DINOv2's form for images of --res pixels, which
`vit-jax convert --to=timm --image_size` has written; its patch embedding
normalises images from -1 to 1. DATA: folder with train/CLASS and test/CLASS.
Trains, and prints the top-1 on test as JSON. With --beside, prints the largest
feature of the images in val, and its largest difference to the feature that
vit_jax computes from BACKBONE.
"""

import argparse
import json
import pathlib
from collections.abc import Callable

import numpy as np
import peft
import timm
import torch
from beside_peft_config import METHODS, RANK
from sklearn.linear_model import LogisticRegression
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision import transforms
from torchvision.datasets import ImageFolder

CUBIC = transforms.InterpolationMode.BICUBIC
# From -1 to 1: the patch embedding has the normalisation.
HALF = (0.5,) * 3
NORMALISED = (transforms.ToTensor(), transforms.Normalize(HALF, HALF))


class Maps(nn.Module):
  """The three maps of `qkv`, one beside the other, as targets of peft."""

  def __init__(self, qkv: nn.Linear):
    super().__init__()
    width = qkv.in_features
    self.query, self.key, self.value = (nn.Linear(width, width) for _ in "qkv")
    for i, part in enumerate((self.query, self.key, self.value)):
      rows = slice(i * width, (i + 1) * width)
      part.weight.data[:] = qkv.weight.data[rows]
      part.bias.data[:] = qkv.bias.data[rows]

  def forward(self, x):
    return torch.cat((self.query(x), self.key(x), self.value(x)), -1)


def load(weights: str, num_classes: int, res: int) -> nn.Module:
  """Returns the model with a head of zeros."""
  model = timm.create_model(
    "vit_small_patch14_dinov2", num_classes=0, img_size=res
  )
  model.load_state_dict(timm.models.load_state_dict(weights))
  model.reset_classifier(num_classes)
  nn.init.zeros_(model.head.weight)
  nn.init.zeros_(model.head.bias)
  return model


def transform(res: int, is_training: bool) -> Callable:
  """Returns the preprocessing."""
  views = (
    transforms.RandomResizedCrop(res, (0.08, 1.0), interpolation=CUBIC),
    transforms.RandomHorizontalFlip(),
  )
  whole = (transforms.Resize((res, res), CUBIC),)
  return transforms.Compose((*(views if is_training else whole), *NORMALISED))


@torch.inference_mode()
def outputs(fn: Callable, images: ImageFolder) -> tuple[np.ndarray, np.ndarray]:
  """Returns outputs and labels of all images."""
  loader = torch.utils.data.DataLoader(images, 128)
  parts = [(fn(x).numpy(), y.numpy()) for x, y in loader]
  x, y = zip(*parts, strict=True)
  return np.concatenate(x), np.concatenate(y)


def start_from_probe(model: nn.Module, images: ImageFolder) -> None:
  """Replaces the head by scikit-learn's logistic regression."""
  features = lambda x: model.forward_head(model.forward_features(x), True)
  x, y = outputs(features, images)
  mean, std = x.mean(0), x.std(0) + 1e-5
  fitted = LogisticRegression(max_iter=1000).fit((x - mean) / std, y)
  kernel = fitted.coef_ / std
  with torch.no_grad():
    model.head.weight[:] = torch.tensor(kernel)
    model.head.bias[:] = torch.tensor(fitted.intercept_ - kernel @ mean)


def train(
  model: nn.Module,
  images: ImageFolder,
  options: dict,
  batch: int,
  steps: int,
  warmup: int,
) -> None:
  """Trains, with a linear warm-up and a cosine."""
  options = dict(options)
  name, clip = options.pop("name"), options.pop("clip_norm", None)
  optimizer = create_optimizer_v2(model, name, **options)
  schedule = CosineLRScheduler(
    optimizer,
    steps - warmup,
    warmup_t=warmup,
    warmup_prefix=True,
    t_in_epochs=False,
  )
  loader = torch.utils.data.DataLoader(
    images, batch, shuffle=True, drop_last=True
  )
  model.train()
  step = 0
  while step < steps:
    for x, y in loader:
      loss = nn.functional.cross_entropy(model(x), y)
      optimizer.zero_grad()
      loss.backward()
      if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
      optimizer.step()
      step += 1
      schedule.step_update(step)
      if step == steps:
        break
  model.eval()


def compare(
  model: nn.Module, backbone: str, images: ImageFolder, res: int
) -> dict[str, float]:
  """Returns the largest feature, and its largest difference to vit_jax's."""
  import vit_jax

  features = lambda x: model.forward_head(model.forward_features(x), True)
  theirs, _ = outputs(features, images)
  pretrained = vit_jax.load(backbone, image_size=res, num_classes=0)
  pixels = np.stack([x.numpy().transpose(1, 2, 0) for x, _ in images])
  ours, *_ = pretrained.model.apply({"params": pretrained.params}, pixels)
  difference = np.abs(np.asarray(ours) - theirs).max()
  return {
    "largest": float(np.abs(theirs).max()),
    "difference": float(difference),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("weights")
  parser.add_argument("data", type=pathlib.Path)
  parser.add_argument("--method", choices=METHODS, default="full")
  parser.add_argument("--beside")
  parser.add_argument("--res", type=int, default=42)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--steps", type=int, default=96)
  parser.add_argument("--warmup", type=int, default=10)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  torch.manual_seed(args.seed)
  method = args.method

  def images(split, is_training):
    ops = transform(args.res, is_training)
    return ImageFolder(args.data / split, ops)

  views, test = images("train", True), images("test", False)
  model = load(args.weights, len(views.classes), args.res).eval()
  if args.beside:
    val = ImageFolder(args.data / "val", transform(args.res, False))
    print(json.dumps(compare(model, args.beside, val, args.res)))
    return
  options = dict(METHODS[method])
  if method == "probe_first":
    start_from_probe(model, images("train", False))
    options["name"] = "momentum"  # timm's sgd has Nesterov's
  if method == "last_blocks":
    del options["freeze"]  # names of vit_jax
    model.requires_grad_(False)
    last = model.blocks[len(model.blocks) // 2 :]
    for part in (last, model.norm, model.head):
      part.requires_grad_(True)
  if method == "lora":
    for block in model.blocks:
      block.attn.qkv = Maps(block.attn.qkv)
    adapters = peft.LoraConfig(
      r=RANK, target_modules=["query", "value"], modules_to_save=["head"]
    )
    model = peft.get_peft_model(model, adapters)
  train(model, views, options, args.batch, args.steps, args.warmup)
  logits, labels = outputs(model, test)
  trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
  top1 = float((logits.argmax(-1) == labels).mean())
  print(json.dumps({"top1": top1, "trained": trained}))


if __name__ == "__main__":
  main()
