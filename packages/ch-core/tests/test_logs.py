"""The logger and write_stderr() raise no error on a closed or full standard error, and leave no text in the buffer."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ch_core.logs import log, write_stderr


@pytest.fixture
def stream_handler() -> Iterator[None]:
    handler = logging.StreamHandler()
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@pytest.mark.usefixtures("stream_handler")
def test_a_closed_stream_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.handlers[-1].stream = closed
    log.warning("not written")
    assert not write_stderr("not written")
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("not written")
    assert not write_stderr("not written")


@pytest.mark.usefixtures("stream_handler")
def test_a_full_disk_keeps_no_text_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - its close raises, too
    try:
        monkeypatch.setattr(sys, "stderr", full)
        log.handlers[-1].stream = full
        log.warning("lost")
        assert not write_stderr("lost\n")
        full.flush()  # raises if text remains. The interpreter would then exit with status 120
        full.write("of the script")
        assert not write_stderr("lost\n")
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # the script's own text and exit status stay
    finally:
        with suppress(OSError):
            full.close()


def test_text_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_stderr("hello\n")
    assert capsys.readouterr().err == "hello\n"
