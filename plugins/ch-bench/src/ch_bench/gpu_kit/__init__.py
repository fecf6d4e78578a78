"""The GPU kit: what is known of these packages on CUDA, found out by one command within ten minutes.

    python -m ch_bench.gpu_kit --out record

needs torch, numpy, pluggy and pytest, and no network. Each part runs in a process of its own, until its deadline; what
it has found is written as it is found, so that a run that is cut says what it knows, and the next one goes on from there.
On a machine without a GPU the same programs run on CPU tensors (``--device cpu --tiny``: CI does that).
"""
