"""The recipes whose prices on TPU slices are compared with earlier ones."""

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


def test_checked_rows_span_the_recipes():
  assert len({row[1:] for row in plans.CHECKED}) == 20
  text = str(plans.CHECKED)
  for part in (*"SBLH", "384 px", "512 px", "LoRA", "DINOv3-L"):
    assert part in text
  for kind in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    assert f"{kind}:" in text
