"""Linear segmentation: mIoU, the head's steps, and coloured shapes."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch_libraries
from evaluators import in_memory
from jax.experimental import multihost_utils
from PIL import Image

from vit_jax import class_names, sharding, step
from vit_jax.batch import DataError, RunShape
from vit_jax.data.sources import open_source
from vit_jax.eval_context import RunContext
from vit_jax.self_supervised import segmentation
from vit_jax.self_supervised.segmentation import SegmentationConfig

SIDE = 32  # pixels of an image, in `ops`


# torchmetrics 1.9.0: MulticlassJaccardIndex(classes, average="macro",
# ignore_index=255) and MulticlassAccuracy(..., average="micro"). In b, two
# classes do not occur; in c, one is predicted but in no mask.
TORCHMETRICS = {
  "a": (4, (), 0.5513052940368652, 0.7106382846832275),
  "b": (6, (2, 5), 0.36848872900009155, 0.4950926899909973),
  "c": (5, (4,), 0.3365662693977356, 0.5631579160690308),
}


def test_scores_are_those_of_torchmetrics():
  rng = np.random.default_rng(0)
  for name, (classes, absent, want_miou, want_accuracy) in TORCHMETRICS.items():
    target = rng.integers(0, classes, (3, 17, 23))
    is_right = rng.random(target.shape) < 0.6
    other = rng.integers(0, classes, target.shape)
    predicted = np.where(is_right, target, other)
    for k in absent:
      target[target == k], predicted[predicted == k] = 0, 1
    if name == "c":
      predicted[0, :2] = 4
    target[rng.random(target.shape) < 0.2] = 255
    matrix = sum(
      segmentation.confusion(p, t, classes)
      for p, t in zip(predicted, target, strict=True)
    )
    assert segmentation.miou(matrix) == pytest.approx(want_miou, rel=1e-6)
    accuracy = matrix.trace() / matrix.sum()
    assert accuracy == pytest.approx(want_accuracy, rel=1e-6)


def test_counts_of_processes_are_added(monkeypatch):
  """In 64 bits: 2,000 masks of Cityscapes have 4 billion pixels."""
  counts = np.array([[2**40, 3], [2**31, 0]])
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(
    multihost_utils,
    "process_allgather",
    lambda x: np.stack([np.asarray(jnp.asarray(x))] * 2),
  )
  total = segmentation.of_all_processes(counts)
  np.testing.assert_array_equal(total, 2 * counts)


@pytest.mark.slow
def test_steps_of_the_head_are_those_of_torch(monkeypatch):
  """Batch norm, 1 x 1 convolution, resized logits, AdamW; predictions."""
  torch = torch_libraries.load("torch")
  resized = functools.partial(
    torch.nn.functional.interpolate, mode="bilinear", align_corners=False
  )
  rng = np.random.default_rng(0)
  steps, classes, width = 60, 3, 6
  x = rng.normal(2, 3, (steps, 2, 3, 4, width)).astype(np.float32)
  masks = rng.integers(0, classes, (steps, 2, 12, 16)).astype(np.uint8)
  masks[rng.random(masks.shape) < 0.1] = 255
  options = SegmentationConfig(
    classes=classes, lr=0.01, weight_decay=0.1, steps=steps
  )
  head = segmentation.train_head(
    zip(x, masks, strict=True), (3, 4), (12, 16), options, steps
  )

  norm = torch.nn.BatchNorm2d(width)
  conv = torch.nn.Conv2d(width, classes, 1)
  kernel = 0.01 * jax.random.normal(jax.random.key(0), (width, classes))
  with torch.no_grad():
    conv.weight.copy_(torch.tensor(np.array(kernel).T[..., None, None]))
    conv.bias.zero_()
  both = torch.nn.Sequential(norm, conv)
  optimizer = torch.optim.AdamW(both.parameters(), lr=0.01, weight_decay=0.1)
  warmup = 2  # steps, 1,500 of 40,000
  schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda k: min(1, k / warmup) * (1 - k / steps)
  )
  for patches, mask in zip(x, masks, strict=True):
    logits = both(torch.tensor(patches.transpose(0, 3, 1, 2)))
    loss = torch.nn.functional.cross_entropy(
      resized(logits, size=(12, 16)),
      torch.tensor(mask).long(),
      ignore_index=255,
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
  moments, kernel = (norm.running_mean, norm.running_var), conv.weight
  affine = norm.weight, norm.bias, kernel[..., 0, 0].T, conv.bias
  want = segmentation.Head(*moments, *affine)
  for name, value in want._asdict().items():
    got, value = getattr(head, name), value.detach().numpy()
    # 60 steps of float32
    np.testing.assert_allclose(got, value, 1e-3, 2e-5, err_msg=name)
  both.eval()
  logits = both(torch.tensor(x[0, :1].transpose(0, 3, 1, 2))).detach()
  got, want = head.logits(x[0, 0]).transpose(2, 0, 1), logits[0].numpy()
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
  for size in ((9, 7), (64, 33), (3, 5)):
    want = resized(logits, size=size)[0].argmax(0).numpy()
    own = logits[0].numpy().transpose(1, 2, 0)
    for band in (segmentation.BAND, 100):  # also rows one by one
      monkeypatch.setattr(segmentation, "BAND", band)
      got = segmentation.predictions(own, size)
      np.testing.assert_array_equal(got, want)


COLOURS = np.array([[40, 40, 40], [220, 60, 60], [60, 60, 220]])


def _write(root, part, number, seed):
  """Writes images of a red and a blue box on grey, and their masks."""
  for kind in ("images", "masks"):
    (root / kind / part).mkdir(parents=True)
  rng = np.random.default_rng(seed)
  for i in range(number):
    height, width = rng.integers(60, 90, 2)
    mask = np.zeros((height, width), np.uint8)
    for label in (1, 2):
      top, left = rng.integers(0, 40, 2)
      mask[top : top + 24, left : left + 24] = label
    noise = rng.normal(0, 15, (height, width, 3))
    image = (COLOURS[mask] + noise).clip(0, 255).astype(np.uint8)
    mask[:3] = 255
    Image.fromarray(image).save(root / "images" / part / f"{i}.png")
    Image.fromarray(mask).save(root / "masks" / part / f"{i}.png")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
  root = tmp_path_factory.mktemp("shapes")
  _write(root, "training", 24, 0)
  _write(root, "dev", 6, 1)
  return root


def _options(root, **changes):
  options = SegmentationConfig(
    dataset=f"images:{root / 'images'}",
    masks=str(root / "masks"),
    ops=f"decode|resize({SIDE})",
    batch_size=8,
    classes=3,
    lr=0.03,
    steps=80,
  )
  return dataclasses.replace(options, **changes)


def _source(options):
  return open_source(options.dataset, options.split, None)


@pytest.mark.slow
def test_coloured_shapes_are_found(shapes, monkeypatch):
  """By a network with random parameters; all background has 0.3."""
  ops, options = f"decode|resize({SIDE})", _options(shapes)
  sizes = dict(model__variant="Ti/4", model__depth=1, model__pool="gap")
  config = tiny.config(**sizes, model__posemb="sincos2d", data__ops=ops)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:2])
  trainer = step.assemble(config, RunShape(3, (SIDE, SIDE), 4), mesh)
  context = RunContext(
    options=options,
    config=config,
    sources={"split": _source(options)},
    predict=trainer.predict,
    mesh=mesh,
    random_params=trainer.init_params,
    head=class_names.Head(0),
  )
  params = trainer.init_params()
  scores = options.make(context).run(params)
  assert scores["segmentation/miou"] > 0.8
  assert scores["segmentation/pixel_accuracy"] > 0.93
  # Patches that do not fit into memory are computed anew.
  monkeypatch.setattr(segmentation, "STORED", 1000)
  again = options.make(context).run(params)
  assert again["segmentation/miou"] > 0.8
  assert again != scores


def test_what_cannot_be_scored_is_one_sentence(shapes, tmp_path):
  def errors(root=shapes, out=("encoded",), **changes):
    options = _options(root, **changes)
    out = dict.fromkeys(out)
    return in_memory.errors(options, _source(options), **out)

  assert not errors()
  for changes, words in (
    ({"masks": ""}, "masks: got none"),
    ({"classes": 1}, "classes: got 1"),
    ({"ops": "decode|resize(40)|central_crop(32)"}, "whole images"),
    ({"dataset": "digits", "split": "test"}, "images:/path"),
    ({"dataset": f"images:{shapes}/images/dev"}, "folder 'train'"),
    ({"out": ()}, "without tokens"),
  ):
    assert any(words in error for error in errors(**changes)), words
  shutil.copytree(shapes, tmp_path / "copy")
  (tmp_path / "copy/masks/dev/2.png").unlink()
  (error,) = errors(tmp_path / "copy")
  assert "1 of 30" in error and "dev/2.png" in error
  pooled = dict(model__name="modern", model__final_norm="pooled")
  for blocks, model, words in ((3, {}, "1 to 2"), (2, pooled, "final norm")):
    model = tiny.config(**model).model
    (error,) = _options(shapes, blocks=blocks).model_errors("s", model)
    assert words in error


def _saved(path, array, **options):
  Image.fromarray(np.asarray(array, np.uint8)).save(path, **options)
  return str(path)


def test_masks(tmp_path):
  image = _saved(tmp_path / "a.jpg", np.zeros((4, 6, 3)))
  classes = np.arange(24).reshape(4, 6) % 3
  classes[0] = 255
  path = _saved(tmp_path / "a.png", classes)
  mask = segmentation.read_mask(path, image, 3)
  np.testing.assert_array_equal(mask, classes)
  mask = segmentation.read_mask(path, image, 2, zero_is_ignored=True)
  want = np.where((classes == 255) | (classes == 0), 255, classes - 1)
  np.testing.assert_array_equal(mask, want)
  palette = Image.fromarray(classes.astype(np.uint8), "L").convert("P")
  palette.putdata(classes.ravel().tolist())
  palette.save(tmp_path / "p.png")
  mask = segmentation.read_mask(str(tmp_path / "p.png"), image, 3)
  np.testing.assert_array_equal(mask, classes)

  exif = Image.Exif()
  exif[0x0112] = 6
  turned = _saved(tmp_path / "t.jpg", np.zeros((6, 4, 3)), exif=exif)
  segmentation.read_mask(path, turned, 3)
  for bad, picture, number, words in (
    (path, image, 2, "got class 2"),
    (path, _saved(tmp_path / "b.jpg", np.zeros((4, 5, 3))), 3, "5 x 4"),
    (_saved(tmp_path / "c.png", np.zeros((4, 6, 3))), image, 3, "colours"),
    (image, image, 3, "cannot be read"),
    (str(tmp_path / "none.png"), image, 3, "cannot be read"),
  ):
    with pytest.raises(DataError, match=words):
      segmentation.read_mask(bad, picture, number)
