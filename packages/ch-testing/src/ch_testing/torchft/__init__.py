"""Members, quorums and scenarios over a real torchft manager, for tests and for measurements."""

__all__ = ["member", "quorum", "scenario", "torchft_plugin", "torchft_suite"]
