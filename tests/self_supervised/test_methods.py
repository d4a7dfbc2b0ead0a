"""Every method on several devices, in microbatches, and on other models."""

import dataclasses

import methods
import numpy as np
import pytest
import tiny
from flax.traverse_util import flatten_dict

from vit_jax import step_checks
from vit_jax.config import checks
from vit_jax.microbatch import microbatches_of
from vit_jax.self_supervised import patch_scores

MESH = dict(mesh__data=2, mesh__fsdp=2)
PARTS = MESH | dict(optim__microbatch=1)  # of 2 rows on each of 4 devices
EIGHT = dict(mesh__fsdp=8, mesh__data=1)
TENSOR = dict(mesh__tensor=2, mesh__data=2)
NOISE = dict(model__dropout=0.1)


def outcome(name, options=None, devices=1, **changes):
  run = methods.Run(methods.config(name, options, **changes), devices)
  return run.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.METHODS)
def test_four_devices_in_two_microbatches_are_one(name):
  """Three steps with dropout; KoLeo compares rows of a whole batch."""
  options = dict(koleo=0.0) if name == "dinov2" else {}
  run = methods.Run(methods.config(name, options, **NOISE, **PARTS), 4)
  assert microbatches_of(run.config, run.mesh) == 2
  methods.assert_close(outcome(name, options, **NOISE), run.outcome())


SCAN = dict(model__depth=2, model__scan=True)
SINKHORN = dict(centring="sinkhorn", patch_head=True, patch_bottleneck=6)
ALONE = SINKHORN | dict(koleo=0.0)  # KoLeo compares rows
MODERN = dict(
  model__name="modern",
  model__rope="dinov3",
  model__posemb="none",
  model__registers=2,
  model__layer_scale=0.1,
)
# Of crops of 8 px, groups of the norms would be one constant pixel, whose
# gradient is rounding.
LARGE = dict(local_ops="decode|resize(64)")
RESNET = dict(data__ops="decode|resize(96)", **tiny.RESNET)
FROZEN = ("embedding/*", "*/encoderblock_0/*")
# Method, its options, options of the model, and where they are compared.
VARIANTS = {
  "mae, tensor": ("mae", {}, NOISE, TENSOR),
  "dino, tensor": ("dino", {}, {}, TENSOR),
  "dino, sinkhorn": ("dino", dict(centring="sinkhorn"), {}, PARTS),
  "dino, gain": (
    "dino", dict(norm_last_layer=False, centring="none"), {}, PARTS,
  ),
  "dino, scan": ("dino", {}, SCAN | dict(model__stochastic_depth=0.5), PARTS),
  "dino, resnet": ("dino", LARGE, RESNET, PARTS),
  "dino, modern": ("dino", {}, MODERN, PARTS),
  "dino, lora": ("dino", {}, dict(lora__rank=2), PARTS),
  "dino, freeze": (
    "dino", {}, dict(model__depth=2, optim__freeze=FROZEN), PARTS,
  ),
  "dinov2, koleo": ("dinov2", {}, {}, MESH),
  "dinov2, eight devices": ("dinov2", {}, {}, EIGHT),
  "dinov2, tensor": ("dinov2", {}, {}, TENSOR),
  "dinov2, sinkhorn in parts": ("dinov2", SINKHORN, {}, MESH),
  "dinov2, scan": ("dinov2", {}, SCAN, MESH),
  "distillation, logits": ("distillation", dict(loss="logits"), {}, TENSOR),
  "distillation, soft": (
    "distillation", dict(loss="soft", label_smoothing=0.1), {}, EIGHT,
  ),
  "distillation, token": (
    "distillation",
    dict(token=True, mixup=0.0, cutmix=1.0),
    dict(model__name="modern", model__distilled=True),
    PARTS,
  ),
  "distillation, features": (
    "distillation", dict(loss="features", mixup=0.0), {}, TENSOR,
  ),
  "masked_patch, mean_color": (
    "masked_patch", dict(target="mean_color"), NOISE, TENSOR,
  ),
  "mae, scan": ("mae", {}, SCAN | dict(model__remat="full"), PARTS),
  "mixing, tensor": ("mixing", {}, {}, TENSOR | dict(mesh__fsdp=2)),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_devices(variant, monkeypatch):
  """With a scan, the one device has a loop over the blocks."""
  name, options, changes, mesh = VARIANTS[variant]
  apart = {k: v for k, v in changes.items() if k != "model__scan"}
  want = outcome(name, options, **apart)
  if variant == "dinov2, sinkhorn in parts":
    monkeypatch.setattr(patch_scores, "MOST_SCORES", 1000)
  devices = int(np.prod([v for k, v in mesh.items() if k.startswith("mesh")]))
  got = outcome(name, options, devices, **changes, **mesh)
  methods.assert_close(want, got)


def test_parameters_of_their_own_are_split_like_any():
  """Of a head, where its size allows, and of a teacher, block by block."""
  both, one = dict(mesh__fsdp=2, mesh__tensor=2), dict(mesh__fsdp=4)
  head = "dino/prototypes/kernel"
  block = "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"
  for name, options, mesh, path, part in (
    ("masked_patch", {}, both, "masked_patch/head/kernel", (16, 16 * 512 // 2)),
    ("dino", {}, both, head, (4, 12)),
    ("dino", dict(prototypes=25), both, head, (4, 25)),
    ("distillation", {}, one, block, (1, 4, 64)),
  ):
    state = methods.Run(methods.config(name, options, **mesh), 4).trainer.state
    trees = [state.fixed.get("teacher", state.params), *state.averages.values()]
    for tree in trees:
      kernel = flatten_dict(tree, sep="/")[path]
      assert kernel.sharding.shard_shape(kernel.shape) == part, name


@pytest.mark.parametrize(
  "name, options",
  [
    pytest.param("dino", {}, marks=pytest.mark.slow),
    pytest.param("dino", dict(centring="sinkhorn"), marks=pytest.mark.nightly),
    pytest.param("dinov2", ALONE, marks=pytest.mark.nightly),
  ],
)
def test_rows_meet_others_only_over_the_whole_batch(name, options):
  """The check of a user's own objectives, which have import paths."""
  run = methods.Run(methods.config(name, options))
  made = dataclasses.replace(run.config.objective, kind="a:B")
  made = dataclasses.replace(run.config, objective=made)
  assert not step_checks.errors(made, run.shape, run.learner, ())


CROPS_OF_10 = dict(local_ops="decode|resize(10)")
# Methods, what is wrong (options have no dots, those of the config two
# underscores), and how the error begins.
WRONG = [
  ("mae masked_patch", tiny.RESNET, "model.variant: got R26x0.5"),
  ("mae", tiny.HYBRID, "model.variant: got R50+Ti/16"),
  ("mae masked_patch", dict(data__ops="decode|resize(8)"), "data.ops"),
  ("mae", dict(data__ops="decode|resize(20)"), "data.ops"),
  ("mae masked_patch", dict(model__pool="map"), "model.pool: got map"),
  ("mae", dict(model__channels=1), "model.channels: got 1"),
  ("mae", dict(MODERN, model__final_norm="pooled"), "model.final_norm"),
  ("masked_patch", dict(MODERN, model__projection=8), "model.projection"),
  (
    "masked_patch",
    dict(model__variant="Ti/6", data__ops="decode|resize(12)"),
    "objective.target: got small",
  ),
  ("mae", dict(mask_ratio=1.0), "objective.mask_ratio: got 1.0"),
  ("mae", dict(mask_ratio=0.0), "objective.mask_ratio: got 0.0"),
  ("mae", dict(decoder_width=18), "objective.decoder_width: got 18"),
  ("mae", dict(decoder_heads=3), "objective.decoder_width: got 16"),
  ("dino dinov2", CROPS_OF_10, "objective.local_ops: got crops of 10x10"),
  ("dino", dict(second_ops="decode|resize(8)"), "objective.second_ops: got"),
  ("dino", dict(model__posemb="learn2d"), "objective.local_ops: got crops of"),
  ("dino", dict(teacher_temperature=0.0), "objective.teacher_temperature: got"),
  (
    "dino",
    dict(temperature_steps=0),
    "objective.teacher_temperature_start: got 0.02",
  ),
  ("dino", dict(model__pre_logits=True), "model.pre_logits"),
  ("dino", dict(model__name="modern", model__pool="map"), "model.pool"),
  ("dinov2", dict(gram=2.0), "objective.gram_model"),
  ("dinov2", dict(gram_model="a file"), "objective.gram_model"),
  ("dinov2", dict(gram_ops="decode|resize(16)"), "objective.gram_ops"),
  ("dinov2", dict(koleo_group=1), "objective.koleo_group"),
  ("dinov2", dict(model__pool="gap", model__class_token=False), "model"),
]


@pytest.mark.parametrize("names, wrong, text", WRONG)
def test_what_does_not_fit_is_one_error(names, wrong, text):
  options = {k: v for k, v in wrong.items() if "__" not in k}
  changes = {k: v for k, v in wrong.items() if "__" in k}
  for name in names.split():
    (error,) = checks.errors(methods.config(name, options, **changes))
    assert error.replace("'", "").startswith(f"config.{text}"), error


def test_what_the_step_cannot_do_is_one_error():
  """KoLeo needs all rows at once; a teacher is the only average."""
  for name, option, value in (
    ("dinov2", "microbatch", 2),
    ("dino", "ema_decay", 0.9),
  ):
    run = methods.Run(methods.config(name))
    optim = dataclasses.replace(run.config.optim, **{option: value})
    made = dataclasses.replace(run.config, optim=optim)
    (error,) = step_checks.errors(made, run.shape, run.learner, ())
    assert f"config.optim.{option}" in error
