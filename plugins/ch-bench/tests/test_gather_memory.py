"""A gather of coded weights takes no more memory than torch's own gather and the codes, with the defaults of glibc."""

import platform

import pytest
from programs.cost.gather_memory import OWN, coded, measure

pytestmark = [pytest.mark.gloo, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and is about glibc's allocator")
@pytest.mark.parametrize("world", [2, 4])
def test_a_coded_gather_stays_below_torchs_own_and_codes(world: int) -> None:
    own = min(peak for peak, _ in measure(OWN, world))
    codes = coded("bf16_compress", world)
    peak = max(peak for peak, _ in measure("bf16_compress", world))
    assert codes == pytest.approx(2 * 3072**2 / 1e6)
    assert peak <= own + codes  # with gloo's whole all-gather it was 122 MB higher on two ranks
