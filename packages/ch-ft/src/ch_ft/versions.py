"""What is installed, without importing it."""

from importlib import metadata


def installed(distribution: str) -> str | None:
    """The version of a distribution, ``None`` if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_torchft() -> str | None:
    """The version of torchft, of whichever distribution it comes from."""
    return installed("torchft") or installed("torchft-nightly")
