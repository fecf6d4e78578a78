"""The contract every hook keeps, as a test class to inherit from."""

from commhooks.testing.contract_gloo import Processes
from commhooks.testing.contract_metadata import Describing
from commhooks.testing.contract_numerics import Numbers
from commhooks.testing.contract_scatter import Scattering
from commhooks.testing.contract_state import Surviving


class HookContract(Describing, Numbers, Scattering, Surviving, Processes):
    """Proves a hook in five lines, in a file that pytest collects::

        from commhooks.testing import HookContract

        class TestMine(HookContract):
            expr = "mine(k=3)"
            tolerance = 0.1

    Reductions are tested over simulated ranks and on gloo processes, foreign ``(state, bucket)`` hooks on gloo
    processes only. What is promised follows from what the hook declares: ``lossy``, ``fields``, ``granularity``,
    capabilities. See :class:`~commhooks.testing.contract_case.Case` for the tolerances.
    """
