"""What torch lacks for lossy methods: random numbers that all ranks agree on, products that are exact whatever the user
allows elsewhere, and views of a flat tensor.
"""

from commhooks.numerics.cutting import cut
from commhooks.numerics.exact import exact_products
from commhooks.numerics.seeded import seeded_normals

__all__ = ["cut", "exact_products", "seeded_normals"]
