"""The rows start processes of their own when they are imported as programs; only the tests here are for pytest."""

collect_ignore_glob = ["[!t]*.py"]
