"""The rows start processes when they are imported as programs. pytest collects only the tests here."""

collect_ignore_glob = ["[!t]*.py"]
