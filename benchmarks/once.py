"""Own images, never looked at, scored once: `python benchmarks/once.py`.

This protocol was written before any model saw the images. Each number comes
from the only run of its kind, and stays as it is. Each run adds a line to
docs/own_images_once.jsonl; a run that has a line is not repeated.

Sets, half of each class at most to learn from, the rest to test, drawn with
seed 0. Transparent pixels become white.
- stamps: photographs and drawings of Debian's tuxpaint-stamps-default, by
  folder: animals, food, household, plants, town, vehicles. Mirrored copies are
  left out. At most 120 of a class; 128 px at most.
- emoji: Google's, 64 px, of npm's emoji-datasource-google, by category, without
  the category of components. At most 90 of a class.
- figures: 72 px, of Debian's wesnoth-1.16-data, by people, for the ten with the
  most units. 4 pictures of a unit at most; no unit is on both sides, and the
  held-out images are split by `group`.

Methods. The backbone is the same ViT-S/14, at 56 px. Those that train make 8
passes over their images with 8 images a step; a tenth of the steps is warm-up.
- raw: scikit-learn's logistic regression on 32 x 32 pixels; defaults.
- probe: the linear probe of configs/folder.py.
- folder: configs/folder.py with budget=0 (no trials) and 8 passes instead of
  40. It holds out a fifth of the images to learn from.
- timm: torch; the defaults of timm's train.py for augmentation, optimizer and
  rate (0.1 for 256 images), all images to learn from.
- automm: torch; the published defaults of AutoGluon's AutoMM for augmentation,
  optimizer and rates, all images to learn from.
Printed: top-1 on the test images with its standard error, and CPU minutes of
the whole process, on one core. One seed.

python benchmarks/once.py BACKBONE STAMPS EMOJI FIGURES [FOLDER]
  [--only SET ...]

BACKBONE: weights of a ViT-S/14 of DINOv2's form. STAMPS: the package's folder
stamps. EMOJI: the package's folder, with emoji.json. FIGURES: the package's
folder images/units. FOLDER: folder of images and runs.
"""

import argparse
import json
import pathlib
import re
import sys
from collections import defaultdict

import numpy as np
from beside_peft import ROOT, call, read
from machine import machine
from PIL import Image

RESULTS = ROOT / "docs/own_images_once.jsonl"
RES, BATCH, EPOCHS = 56, 8, 8
STAMPS = ("animals", "food", "household", "plants", "town", "vehicles")
PEOPLES = 10  # classes of the figures
PER_UNIT = 4  # pictures
METHODS = {
  "raw": "raw pixels, logistic regression",
  "probe": "linear probe",
  "folder": "folder",
  "timm": "timm's defaults",
  "automm": "AutoMM's defaults",
}
RAW = "raw"  # first argument of a call that scores raw pixels

# Class -> files, in units that stay together.
Files = dict[str, list[list[pathlib.Path]]]


def stamps(folder: pathlib.Path) -> Files:
  """Pictures by their first folder."""
  return {
    name: [
      [p]
      for p in sorted((folder / name).rglob("*.png"))
      if not p.stem.endswith("mirror")
    ]
    for name in STAMPS
  }


def emoji(folder: pathlib.Path) -> Files:
  """Pictures by category."""
  result = defaultdict(list)
  for row in json.loads((folder / "emoji.json").read_text()):
    if row["has_img_google"] and row["category"] != "Component":
      path = folder / "img/google/64" / row["image"]
      result[row["category"].replace(" ", "_")].append([path])
  return dict(result)


def figures(folder: pathlib.Path) -> Files:
  """Pictures by people and unit."""
  found = defaultdict(lambda: defaultdict(list))
  for path in sorted(folder.rglob("*.png")):
    people, *rest = path.relative_to(folder).parts
    if rest:
      found[people][re.match("[A-Za-z0-9]+", rest[0])[0]].append(path)
  peoples = sorted(found, key=lambda p: (-len(found[p]), p))[:PEOPLES]
  return {people: [*found[people].values()] for people in sorted(peoples)}


SETS = {  # name -> its files, the most units of a class, options of `folder`
  "stamps": (stamps, 120, ""),
  "emoji": (emoji, 90, ""),
  "figures": (figures, 1000, ",group=^[^_]+"),
}


def write(files: Files, most: int, folder: pathlib.Path) -> None:
  """Writes train/CLASS and test/CLASS, with a half of the units each."""
  rng = np.random.default_rng(0)
  for name, units in files.items():
    order = rng.permutation(len(units))[:most]
    for i, unit in enumerate(order):
      split = "train" if i < len(order) // 2 else "test"
      for k in rng.permutation(len(units[unit]))[:PER_UNIT]:
        image = Image.open(units[unit][k]).convert("RGBA")
        image.thumbnail((128, 128))
        white = Image.new("RGBA", image.size, "white")
        path = folder / split / name / f"{name}-{unit}_{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.alpha_composite(white, image).convert("RGB").save(path)


def raw(data: pathlib.Path) -> float:
  """Returns the top-1 of logistic regression on pixels."""
  from sklearn.linear_model import LogisticRegression

  def read(split):
    paths = sorted((data / split).glob("*/*"))
    pixels = [np.ravel(Image.open(p).resize((32, 32))) / 255 for p in paths]
    return np.array(pixels), [p.parent.name for p in paths]

  model = LogisticRegression(max_iter=1000).fit(*read("train"))
  return model.score(*read("test"))


def run(
  method: str,
  data: pathlib.Path,
  init: str,
  more: str,
  weights: pathlib.Path,
  workdir: pathlib.Path,
) -> tuple[float, float]:
  """Returns the top-1 and the CPU minutes of a method."""
  num_images = sum(1 for _ in (data / "train").glob("*/*"))
  steps = EPOCHS * (num_images // BATCH)
  if method == "raw":
    out, minutes = call([__file__, RAW, data])
    return float(out), minutes
  if method in ("timm", "automm"):
    out, minutes = call(
      [
        *(ROOT / "benchmarks/finetune_torch.py", weights, data),
        *(f"--method={method}", f"--res={RES}", f"--batch={BATCH}"),
        *(f"--steps={steps}", f"--warmup={steps // 10}"),
      ]
    )
    return json.loads(out.splitlines()[-1])["top1"], minutes
  config = f"folder:path={data},init={init},res={RES},budget=0{more}"
  # Of the images to learn from, a fifth is held out.
  steps = EPOCHS * (num_images * 4 // 5 // BATCH)
  length = steps, steps // 10
  if method == "probe":
    length = 1, 0
  _, minutes = call(
    [
      *("-m", "vit_jax", "train", f"--config={config}", f"--workdir={workdir}"),
      *(
        f"--config.total_steps={length[0]}",
        f"--config.data.batch_size={BATCH}",
      ),
      f"--config.optim.warmup_steps={length[1]}",
      *(["--config.optim.lr=1e-12"] * (method == "probe")),
    ]
  )
  rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  (top1,) = (row["test/top1"] for row in rows if "test/top1" in row)
  return top1, minutes


def main() -> None:
  if sys.argv[1:2] == [RAW]:
    print(raw(pathlib.Path(sys.argv[2])))
    return
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("backbone")
  for name in SETS:
    parser.add_argument(name, type=pathlib.Path)
  parser.add_argument("folder", nargs="?", default="runs/once")
  parser.add_argument("--only", nargs="+", choices=SETS, default=(*SETS,))
  args = parser.parse_args()
  folder = pathlib.Path(args.folder).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  weights = folder / f"timm_{RES}.safetensors"
  if not weights.exists():
    call(
      [
        *("-m", "vit_jax", "convert", args.backbone, weights),
        *("--to=timm", f"--image_size={RES}"),
      ]
    )
  for name, (files, most, more) in SETS.items():
    if name not in args.only:
      continue
    data = folder / "data" / name
    if not data.exists():
      write(files(getattr(args, name)), most, data)
    for method in METHODS:
      if (name, method) in {
        (row["set"], row["method"]) for row in read(RESULTS)
      }:
        continue
      workdir = folder / f"{name}_{method}"
      top1, minutes = run(method, data, args.backbone, more, weights, workdir)
      row = {
        "set": name,
        "method": method,
        **{
          s: sum(1 for _ in (data / s).glob("*/*")) for s in ("train", "test")
        },
        "top1": top1,
        "minutes": round(minutes, 2),
        "machine": machine(),
      }
      with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
  print(table(read(RESULTS)))


def table(rows: list[dict]) -> str:
  """Returns top-1 in %, its standard error, and CPU minutes."""
  lines = [
    f"| set | images | test | {' | '.join(METHODS.values())} |",
    f"|---|---:|---:|{'---:|' * len(METHODS)}",
  ]
  for name in SETS:
    of_set = {row["method"]: row for row in rows if row["set"] == name}
    if len(of_set) < len(METHODS):
      continue
    cells = []
    for row in map(of_set.get, METHODS):
      error = np.sqrt(row["top1"] * (1 - row["top1"]) / row["test"])
      score = f"{100 * row['top1']:.1f} ± {100 * error:.1f}"
      cells.append(f"{score}, {row['minutes']:.1f} min")
    first = of_set["raw"]
    lines.append(
      f"| {name} | {first['train']} | {first['test']} | {' | '.join(cells)} |"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  main()
