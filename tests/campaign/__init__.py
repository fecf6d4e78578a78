"""The random campaign draws small training runs from a seed and checks each against the expected result of plain DDP.

Start ``python -m tests.campaign --minutes 3`` in the repository's root, or ``nox -s campaign``. ``draw`` makes a case
from a seed and a number. ``run`` runs it in separate processes, and the ranks run ``ddp``, ``fsdp`` or ``simulated``.
``checks`` defines right results, ``refusals`` lists documented errors, and ``plants`` holds hooks that are wrong on
purpose.
"""
