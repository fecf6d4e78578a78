"""Checkpoints of hooks: tensors and plain values by parameter name, one state per rank.

Format 2. Every key is required, and no other is allowed::

    {"format": 2,
     "expr": str,                              # the hook; of a bare state, the reduction that used it
     "config": dict | None,                    # every option, with the provider and version of each level
     "world_size": int, "rank": int | None,    # rank None: merged over all ranks, for any rank
     "step": int,                              # committed steps
     "params": [[name, [size, ...]], ...],     # the model's trainable parameters, in model order
     "buckets": [[name, ...], ...],            # DDP's, in order; empty if results do not depend on them
     "fields": {field: "local" | "shared"},    # "local" differs from rank to rank: save every rank's
     "entries": {name: {field: Tensor}}}

A field with a number for each element of the parameter has the parameter's own shape and order.

``torch.load(weights_only=True)`` reads it. A load checks everything before it changes anything. It never imports, calls or
allocates by a value that it read.

On another world size every rank gets the mean of the old residuals (``world_change="mean"``, from :func:`merge`). Only that
mean enters the averaged update, so no part of any gradient is lost.

There are two formats on disk: this dict, and a distributed checkpoint (:mod:`commhooks.checkpoint.dcp`). :func:`gather` puts
the dicts of all ranks into one object.
"""

from commhooks.checkpoint.format import FORMAT, Saved, read
from commhooks.checkpoint.one_file import gather, load_gathered
from commhooks.checkpoint.save_load import load_state_dict, state_dict
from commhooks.checkpoint.world_change import merge

__all__ = ["FORMAT", "Saved", "gather", "load_gathered", "load_state_dict", "merge", "read", "state_dict"]
