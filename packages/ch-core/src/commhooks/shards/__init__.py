"""Gradients that the ranks share out: each keeps the average of one part."""

from commhooks.shards.layout import ShardLayout, Shards
from commhooks.shards.plain import plain_scatter

__all__ = ["ShardLayout", "Shards", "plain_scatter"]
