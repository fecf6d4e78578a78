"""The torchtitan override. `tests/frameworks/matrix.py --only titan` trains with it if torchtitan is installed."""

import importlib.util

import pytest

from ch_fsdp.torchtitan import attach


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is not None, reason="torchtitan is installed")
def test_without_torchtitan_the_error_names_the_package() -> None:
    with pytest.raises(ImportError, match=r"pip install 'torchtitan>=0\.3'"):
        attach(None, "powersgd(rank=4)")


def test_the_override_is_the_config_of_a_checkpointer_that_attaches() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.components.checkpointer import CheckpointManager

    from ch_fsdp.torchtitan import CommHookCheckpointManager

    before = CheckpointManager.Config(enable=True, folder="there", interval=7)
    config = attach(before, "powersgd(rank=4)", axis="replicate")
    assert (config.hook, config.attach_options) == ("powersgd(rank=4)", {"axis": "replicate"})
    assert (config.enable, config.folder, config.interval) == (True, "there", 7)
    assert config._owner is CommHookCheckpointManager
