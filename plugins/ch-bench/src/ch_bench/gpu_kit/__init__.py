"""The GPU kit: one command that tests these packages on CUDA within ten minutes.

    python -m ch_bench.gpu_kit --out record

It needs torch, numpy and pluggy, and no network. Each part runs in its own process until its deadline and writes its
findings at once, so that an interrupted run can continue. Without a GPU the same programs run on CPU tensors (``--device cpu
--tiny``, as in CI).
"""
