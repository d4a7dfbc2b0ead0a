"""Draws what checkpoints learned, and where they look: `vit-jax visualize`."""

import argparse
import html
import io
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence

import numpy as np
from etils import epath
from PIL import Image

import vit_jax
from vit_jax import class_names
from vit_jax.callbacks import startup
from vit_jax.checkpointing import checkpointer
from vit_jax.config import build, config_files
from vit_jax.distributed import processes
from vit_jax.inference import overlay, streaming
from vit_jax.inference.pretrained import Pretrained
from vit_jax.models.stacking import unstack_blocks
from vit_jax.objectives.objective import Pictures
from vit_jax.options import unexpected
from vit_jax.paths import is_remote, printable
from vit_jax.tools.reporting import model_figures
from vit_jax.tools.reporting import runs as runs_lib
from vit_jax.tools.reporting.charts import ChartFiles, file_stem
from vit_jax.tools.reporting.page import (
  breakable,
  gallery,
  missing,
  page,
  table,
)
from vit_jax.tools.scoring import published_scores
from vit_jax.writers import run_info
from vit_jax.writers.atomic_files import replace_text

NUM_IMAGES = 128  # as in Figure 7
PAGE = "index.html"
NUM_SHOWN = 24  # images on the page; all images have files


def run(args: argparse.Namespace) -> list[pathlib.Path]:
  """Writes the page and the pictures, and returns their paths.

  Raises:
    ValueError: Arguments are wrong; it lists all errors before anything is
      computed.
  """
  out, errors = pathlib.Path(args.out), []
  if out.exists() and not out.is_dir():
    errors.append(f"--out: got {args.out!r}, a file; expected a folder.")
  models = _loaded([args.checkpoint, *args.beside], errors)
  images, left_out = _images(args)
  ahead = 2 * (os.cpu_count() or 1)
  rows = {
    label: list(streaming.read_all(images, vit.ops, ahead=ahead))
    for label, (_, vit) in models.items()
  }
  unread = {r.name: r.error for read in rows.values() for r in read if r.error}
  images = [image for image in images if image.name not in unread]
  for name, error in unread.items():
    # An image that was named must be readable; an image of a folder need not.
    is_needed = name in args.images or not images
    (errors if is_needed else left_out).append(f"{printable(name)}: {error}")
  for label, (_, vit) in models.items():
    errors += _patch_errors(args.patch, label, vit)
  names = _pictures([image.name for image in images])
  if not errors:
    try:
      out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      errors.append(f"--out: got {args.out!r}: {e.strerror or e}.")
  if errors:
    raise ValueError("\n".join(dict.fromkeys(errors)))
  inspected, own = [], {}
  for label, (path, vit) in models.items():
    arrays = [row.pixels for row in rows[label] if row.name not in unread]
    print(f"{path}: {vit.config.variant}, {_counted(arrays)}", flush=True)
    captions = captions_of([image.name for image in images], vit, arrays)
    name = file_stem(label) if len(models) > 1 else ""
    inspected.append(
      model_figures.inspect_model(name, label, vit, arrays, captions)
    )
    if pictures := pictures_of(path, arrays[:NUM_SHOWN]):
      title = file_stem(pictures.title.lower())
      own["_".join(filter(None, [title, name]))] = pictures
  return _write(
    out, inspected, list(models.values()), names, args.patch, left_out, own
  )


def pictures_of(path: str, images: Sequence[np.ndarray]) -> Pictures | None:
  """Returns what the objective of a run shows of images, or None.

  `vit_jax.load` leaves the objective's own parameters behind, so the checkpoint
  is read once more.

  Args:
    path: A run, a checkpoint, or other weights, which show nothing.
    images: Preprocessed images, uint8 [h, w, c].
  """
  try:
    metadata = checkpointer.load_metadata(path)
  except (OSError, ValueError):  # weights of another form
    return None
  if not images or not metadata.get("objective_parameters"):
    return None
  config, _ = build(metadata["config"])
  params, _ = checkpointer.load_params(path)
  return config.objective.pictures(
    config.model.for_inference(),
    unstack_blocks(params, config.model),
    np.stack(images),
  )


def _loaded(
  paths: Sequence[str], errors: list[str]
) -> dict[str, tuple[str, Pretrained]]:
  """Returns label -> (path, model); appends failures to `errors`."""
  models = {}
  for path in paths:
    try:
      vit = vit_jax.load(path, verbose=False)
    except (OSError, ValueError) as e:
      text = str(e)
      errors.append(text if path in text else f"{path}: {text}")
      continue
    folder = config_files.run_of(path)
    label = folder.name if folder else published_scores.name_of(path)
    models[path if label in models else label or path] = (path, vit)
  return models


def _images(
  args: argparse.Namespace,
) -> tuple[list[streaming.Named], list[str]]:
  """Returns the images, and texts about missing ones."""
  if args.images:
    images = list(streaming.find(args.images))
    more = len(images) - NUM_IMAGES
    left_out = [f"{more:,} of the images, all after the first {NUM_IMAGES}"]
    return images[:NUM_IMAGES], left_out if more > 0 else []
  try:
    return _evaluation_images(args.checkpoint), []
  except Exception as e:  # The page is useful without images, too.
    why = str(e).rstrip(".")
    return [], [
      f"images ({why}. Name some: vit-jax visualize CHECKPOINT IMAGE)"
    ]


def _evaluation_images(path: str) -> list[streaming.Named]:
  """Returns evenly spaced images of the split on which a run is scored.

  Raises:
    ValueError: There are no such images.
  """
  folder = config_files.run_of(path)
  if folder is None:
    raise ValueError("none were given, and published weights come without.")
  (run,) = runs_lib.find_runs(str(folder))
  scored = next((e for e in run.evals.values() if e.scores_head), None)
  if scored is None:
    raise ValueError("none were given, and the run scores no images.")
  # Only data sets need TensorFlow; image files do not.
  from vit_jax.data.sources import Sources

  data = run.config.get("data", {})
  sources = Sources(
    data.get("data_dir"), fake=run.config.get("fake_data", False)
  )
  source = sources.open(scored.dataset, scored.split)
  num = min(NUM_IMAGES, source.num_examples)
  places = np.linspace(0, source.num_examples - 1, num).round().astype(int)
  print(f"images of {scored.dataset}, {scored.split}", flush=True)
  named = []
  for record in source.raw_at(np.unique(places)).map(source.load):
    label, image = record["label"].numpy(), record["image"].numpy()
    name = f"record {int(record['index'])}"
    if label.ndim == 0 and source.class_names and label >= 0:
      name += f" ({source.class_names[label]})"
    named.append(streaming.Named(name, image))
  return named


def _patch_errors(
  patch: tuple[int, int] | None, label: str, vit: Pretrained
) -> list[str]:
  rows, columns = vit.config.grid(vit.image_size)
  if patch is None or (patch[0] < rows and patch[1] < columns):
    return []
  expected = f"up to {rows},{columns}, the patches of {label}"
  return [unexpected("--patch", f"{patch[0] + 1},{patch[1] + 1}", expected)]


def _pictures(names: Sequence[str]) -> list[str]:
  """Returns the path in DIR of the picture of each image."""
  stems = [os.path.splitext(os.path.basename(name))[0] for name in names]
  return [
    f"rollout/{i:03}_{file_stem(stem)}.png" for i, stem in enumerate(stems, 1)
  ]


def captions_of(
  names: Sequence[str], vit: Pretrained, images: Sequence[np.ndarray]
) -> list[str]:
  """Returns captions: names, and for shown images the prediction.

  It is the most probable class, or all numbers of a regression.
  """
  captions = [printable(os.path.basename(name)) for name in names]
  if not (vit.num_classes and len(images)):
    return captions
  shown = np.stack(images[:NUM_SHOWN])
  answers = np.asarray(vit.probabilities(vit.params, shown))
  what = "number" if vit.is_regression else "class"
  outputs = vit.class_names or [f"{what} {i}" for i in range(vit.num_classes)]
  for i, row in enumerate(answers):
    if vit.is_regression:
      pairs = zip(outputs, row, strict=True)
      text = ", ".join(f"{name} {value:.4g}" for name, value in pairs)
    else:
      best = int(row.argmax())
      text = f"{class_names.readable(outputs[best])} {100 * row[best]:.0f}%"
    captions[i] += f" → {text}"
  return captions


def _write(
  out: pathlib.Path,
  inspected: Sequence[model_figures.InspectedModel],
  models: Sequence[tuple[str, Pretrained]],
  names: Sequence[str],
  patch: tuple[int, int] | None,
  left_out: list[str],
  own: dict[str, Pictures],
) -> list[pathlib.Path]:
  """Writes all files, prints their paths and returns them.

  `own` has the pictures of the models' objectives, by the name of their file.
  """
  chart_files = ChartFiles()
  sections = model_figures.all_sections(
    inspected, chart_files, patch, NUM_SHOWN
  )
  captions = inspected[0].captions
  rows = {name: [*map(overlay.row, p.rows)] for name, p in own.items()}
  for name, shown in own.items():
    body = gallery(zip(rows[name], captions, strict=False))
    text = html.escape(shown.text)
    sections.append(model_figures.Section(shown.title, text, body, []))
  title = f"Inside {', '.join(i.label for i in inspected)}"
  body = "\n".join(
    [
      f"<h1>{breakable(title)}</h1>",
      _facts(inspected, models),
      missing("; ".join(left_out)),
      *(section.html() for section in sections),
    ]
  )
  files = {name: svg.encode() for name, svg in chart_files.files.items()}
  pictures = list(model_figures.pictures(inspected))
  if pictures:
    shown = [image for image, _ in pictures[:NUM_SHOWN]]
    files["rollout.png"] = _png(overlay.sheet(shown, 3))
  files |= {
    f"{name}.png": _png(overlay.sheet(r, 2)) for name, r in rows.items()
  }
  files |= {
    name: _png(image) for name, (image, _) in zip(names, pictures, strict=False)
  }
  for name, data in files.items():
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(data)
  replace_text(epath.Path(out / PAGE), page(title, body))
  written = [PAGE, *files]
  left_out = left_out + [
    f"{section.title}: {text}"
    for section in sections
    for text in section.left_out
  ]
  _print_written(out, written, left_out)
  return [out / name for name in written]


def _print_written(
  out: pathlib.Path, names: list[str], left_out: list[str]
) -> None:
  """Prints the paths of the files; the pictures of images are one line."""
  singles = [name for name in names if name.startswith("rollout/")]
  for name in names[: len(names) - len(singles)]:  # those come last
    print(f"wrote     {out / name}")
  if singles:
    print(f"wrote     {out / 'rollout'}/, {_counted(singles)}")
  for text in left_out:
    print(f"left out  {text}")


def _counted(images: Sequence) -> str:
  return "1 image" if len(images) == 1 else f"{len(images)} images"


def _facts(
  inspected: Sequence[model_figures.InspectedModel],
  models: Sequence[tuple[str, Pretrained]],
) -> str:
  """Returns a table of the models, and of the training of their runs."""
  columns = [model_facts(path, vit) for path, vit in models]
  rows = [
    [key, *(facts.get(key, "—") for facts in columns)]
    for key in dict.fromkeys(key for facts in columns for key in facts)
  ]
  return table("facts", ["", *(i.label for i in inspected)], rows)


def model_facts(path: str, vit: Pretrained) -> dict[str, str]:
  """Returns name -> text about a model and the training of its run."""
  config, (height, width) = vit.config, vit.image_size
  rows, columns = config.grid(vit.image_size)
  has_patches = config.num_tokens(vit.image_size) is not None
  patches = f", {rows} × {columns} patches" if has_patches else ""
  size = run_info.num_params(vit.params)
  facts = {
    "model": f"{config.variant}, {size:,} parameters",
    "images": f"{height} × {width} px{patches}",
  }
  for key in ("posemb", "posemb_at", "rope", "pool"):
    if value := getattr(config, key, None):
      facts[f"model.{key}"] = value
  folder = config_files.run_of(path)
  if folder is not None and not is_remote(folder):  # see find_runs
    (run,) = runs_lib.find_runs(str(folder))
    facts["data"] = run.dataset
    facts["steps"] = f"{run.steps:,}"
    optim = run.config.get("optim", {})
    for key in ("lr", "weight_decay"):
      if key in optim:
        facts[f"optim.{key}"] = f"{optim[key]:g}"
  facts["file"] = path
  return facts


def _png(image: Image.Image) -> bytes:
  buffer = io.BytesIO()
  image.save(buffer, "png")
  return buffer.getvalue()


def main(args: argparse.Namespace) -> None:
  """Draws the figures, or ends the process with all errors."""
  processes.refuse_several_hosts()
  startup.use_cache()
  # Hides Pillow's warnings; unreadable images are reported anyway.
  warnings.filterwarnings("ignore", module="PIL")
  try:
    run(args)
  except ValueError as e:
    sys.exit(str(e))
  except BrokenPipeError:  # the reader of the output has ended
    raise
  except OSError as e:
    sys.exit(f"{e.filename or args.out}: {e.strerror or e}")
