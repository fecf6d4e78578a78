"""The costs again, with the shapes of a GPT of 1.3 G parameters: 24 layers, 2048 wide (Brown et al. 2020, table 2.1)."""

from ch_bench.gpu_kit import costs
from ch_bench.gpu_kit.rows import Rows
from ch_bench.gpu_kit.setting import Setting

GPT3_XL = (24, 2048, 50257, 2048)


def run(rows: Rows, setting: Setting) -> None:
    costs.run(rows, setting, GPT3_XL)
