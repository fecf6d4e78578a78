"""The gradient-communication layer for PyTorch data parallelism.

Every hook has a name: `commhooks.attach(model, "bf16_wrapper(powersgd(rank=4))")` installs one,
`commhooks.list_hooks()` shows what is installed. The names below are imported when first used: importing this
package, and listing hooks, loads no torch.
"""

from ch_core import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
