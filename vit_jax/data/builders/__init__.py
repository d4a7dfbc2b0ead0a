"""TFDS builders of data that need no download.

After `import vit_jax.data.builders`, `tfds.builder("digits")` and
`tfds.builder("glyphs/size=32,count=20000,seed=0")` work like any other.
"""

from vit_jax.data.builders.digits import Digits
from vit_jax.data.builders.glyphs import Glyphs

__all__ = ["Digits", "Glyphs"]
