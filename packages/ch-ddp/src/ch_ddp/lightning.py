"""Where the Lightning callback was before there were others: configuration files that name it are told where it is."""


def __getattr__(name: str) -> object:
    if name == "CommHookCallback":
        raise ImportError(
            "CommHookCallback is in ch_ddp.frameworks.lightning: write ch_ddp.frameworks.lightning.CommHookCallback"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
