"""The recipes whose estimates on TPU slices are compared with earlier ones."""

import plans
import pytest

from vit_jax.config import checks, cli


@pytest.mark.parametrize("title,config,topology", plans.CHECKED)
def test_checked_rows_are_recipes(title, config, topology):
  name, *options = config.split()
  args = cli.parse("x", {}, [f"--config={name}", *options])
  assert not args.errors and not checks.errors(args.config)
  assert (("scan" in title), ("LoRA" in title)) == (
    args.config.model.scan,
    args.config.lora.rank is not None and args.config.lora.rank > 0,
  )


def test_a_row_whose_smallest_slice_does_not_fit():
  plan = dict.fromkeys(("cycles_seconds", "optimal_seconds"), 1.0)
  plan |= {"price_seconds": 1.0, "link_seconds": 0.5, "fits": True}
  plan |= {"between_slices_seconds": 0.0, "images_per_second": 16.0}
  plan |= {"batch_size": 8, "chips": 8}
  plan |= dict.fromkeys(("peak_bytes", "capacity_bytes"), 2**30)
  small = plan | {"fits": False, "images_per_second": None}
  row = plans.scaling_row("x", "v5e:4x4", plan, small)
  cells = "x | v5e:4x4 | 1 | 1.00 | 1000.0 / 1000.0 / 1000.0 | 2 | - | 50 %"
  assert row == f"| {cells} |"


def test_checked_rows_span_the_recipes():
  assert len({row[1:] for row in plans.CHECKED}) == 20
  text = str(plans.CHECKED)
  for part in (*"SBLH", "384 px", "512 px", "LoRA", "DINOv3-L"):
    assert part in text
  for kind in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    assert f"{kind}:" in text
