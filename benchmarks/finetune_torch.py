"""Fine-tuning in torch, with timm and peft: `benchmarks/beside_peft.py` calls it.

python benchmarks/finetune_torch.py WEIGHTS DATA --method=full [--res=42]
  [--batch=32] [--steps=96] [--warmup=10] [--seed=0]

WEIGHTS: a ViT-S/14 of DINOv2's form for images of --res pixels, which
`vit-jax convert --to=timm --image_size` has written; its patch embedding
normalises images from -1 to 1. DATA: folder with train/CLASS and test/CLASS.
Trains, and prints the top-1 on test as JSON.
"""

import argparse
import json
import pathlib

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
from torchvision.transforms.functional import InterpolationMode

CUBIC = InterpolationMode.BICUBIC
NORMALISED = (
  transforms.ToTensor(),
  transforms.Normalize((0.5,) * 3, (0.5,) * 3),
)
ADAPTED = ["query", "value"]


class Maps(nn.Module):
  """The three maps of `qkv`, one beside the other, as peft's targets."""

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


def views(res: int) -> transforms.Compose:
  return transforms.Compose(
    (
      transforms.RandomResizedCrop(res, (0.08, 1.0), interpolation=CUBIC),
      transforms.RandomHorizontalFlip(),
      *NORMALISED,
    )
  )


def whole(res: int) -> transforms.Compose:
  return transforms.Compose((transforms.Resize(res, CUBIC), *NORMALISED))


@torch.inference_mode()
def outputs(fn, images: ImageFolder) -> tuple[np.ndarray, np.ndarray]:
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("weights")
  parser.add_argument("data", type=pathlib.Path)
  parser.add_argument("--method", required=True, choices=METHODS)
  parser.add_argument("--res", type=int, default=42)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--steps", type=int, default=96)
  parser.add_argument("--warmup", type=int, default=10)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  torch.manual_seed(args.seed)
  train = ImageFolder(args.data / "train", views(args.res))
  model = load(args.weights, len(train.classes), args.res)
  options = dict(METHODS[args.method])
  if args.method == "probe_first":
    model.eval()
    start_from_probe(model, ImageFolder(args.data / "train", whole(args.res)))
  if options.pop("freeze", None):
    model.requires_grad_(False)
    for part in (
      *model.blocks[len(model.blocks) // 2 :],
      model.norm,
      model.head,
    ):
      part.requires_grad_(True)
  if args.method == "lora":
    for block in model.blocks:
      block.attn.qkv = Maps(block.attn.qkv)
    adapters = peft.LoraConfig(
      r=RANK, target_modules=ADAPTED, modules_to_save=["head"]
    )
    model = peft.get_peft_model(model, adapters)
  clip = options.pop("clip_norm", None)
  name = options.pop("name")
  optimizer = create_optimizer_v2(
    model, "momentum" if name == "sgd" else name, **options
  )
  schedule = CosineLRScheduler(
    optimizer,
    args.steps - args.warmup,
    warmup_t=args.warmup,
    warmup_prefix=True,
    t_in_epochs=False,
  )
  loader = torch.utils.data.DataLoader(
    train, args.batch, shuffle=True, drop_last=True
  )
  model.train()
  step = 0
  while step < args.steps:
    for x, y in loader:
      loss = nn.functional.cross_entropy(model(x), y)
      optimizer.zero_grad()
      loss.backward()
      if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
      optimizer.step()
      step += 1
      schedule.step_update(step)
      if step == args.steps:
        break
  model.eval()
  logits, labels = outputs(
    model, ImageFolder(args.data / "test", whole(args.res))
  )
  trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
  top1 = float((logits.argmax(-1) == labels).mean())
  print(json.dumps({"top1": top1, "trained": trained}))


if __name__ == "__main__":
  main()
