"""The only place of this package that reads or sets private parts of torch. Look here first if torch changes.

FSDP2 hands a hook a flat tensor without names, and its setters refuse modules with several parameter groups. Each module
checks at import that torch has the names it uses, and ``tests/test_torch_internals.py`` compares the results with torch's
public API.

Modules:
    param_groups: FSDP2's parameter groups, their two hook slots, names and shapes of shards.
    hsdp_mesh: FSDP2's own all-reduce between replicas on a 2-D mesh, switched off and on.
    backward_end: the place where FSDP2 ends a backward.
    required: the check that torch has a name.
"""
