"""TFDS builders of data that need no download.

After `import vit_jax.data.builders`, `tfds.builder("digits")`,
`tfds.builder("glyphs/size=32,count=20000,seed=0")` and
`tfds.builder("imagenet21k")` work like any other.
"""

from vit_jax.data.builders.digits import Digits
from vit_jax.data.builders.glyphs import Glyphs
from vit_jax.data.builders.imagenet21k import Imagenet21k

__all__ = ["Digits", "Glyphs", "Imagenet21k"]
