"""The random campaign: small training runs drawn from a seed, each checked against what plain DDP would have done.

``python -m tests.campaign --minutes 3`` from the repository's root, or ``nox -s campaign``. ``draw`` makes a case from a
seed and a number, ``run`` runs it in processes of its own, ``ddp``, ``fsdp`` and ``simulated`` are what the ranks run,
``checks`` says what is right, ``refusals`` which errors are documented, ``plants`` holds hooks that are wrong on purpose.
"""
