"""Checkpoints of hooks: tensors and plain values, keyed by parameter name, one per rank.

Format 2, every key required and no other allowed::

    {"format": 2,
     "expr": str,                              # of the hook; of a bare state, of the reduction that used it
     "config": dict | None,                    # every option, with the provider and version of each level
     "world_size": int, "rank": int | None,    # rank None: merged over all ranks, of use to any rank
     "step": int,                              # committed steps
     "params": [[name, [size, ...]], ...],     # the model's trainable parameters, in model order
     "buckets": [[name, ...], ...],            # DDP's, in order; empty if results do not depend on them
     "fields": {field: "local" | "shared"},    # "local" differs from rank to rank: save every rank's
     "entries": {name: {field: Tensor}}}

A field with a number for each element of the parameter has the parameter's own shape and order. In format 1 (0.1.0) it has
the order in which the hook keeps it.

``torch.load(weights_only=True)`` reads it. Everything is verified before anything is changed, and nothing that is read
is ever imported, called or used as a size.

On another world size the mean of the old residuals goes to every rank (``world_change="mean"``, from :func:`merge`):
the mean over ranks is all of a residual that enters the averaged update, so no part of any gradient is lost.
"""

from commhooks.checkpoint.format import FORMAT, Saved, read
from commhooks.checkpoint.gathering import gather, load_gathered
from commhooks.checkpoint.merging import merge
from commhooks.checkpoint.save_load import load_state_dict, state_dict

__all__ = ["FORMAT", "Saved", "gather", "load_gathered", "load_state_dict", "merge", "read", "state_dict"]
