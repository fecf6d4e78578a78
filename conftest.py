"""For every test of the repository."""

from hypothesis import settings

# Machines that run tests are shared and noisy; the time limit of each test is pytest-timeout's.
# The same examples in every run: a failure is the change's, not the day's. `--hypothesis-profile=default` draws new ones.
settings.register_profile("commhooks", deadline=None, derandomize=True)
settings.load_profile("commhooks")

# What tests start as programs of their own does its work when it is imported, as a user's script does.
collect_ignore_glob = ["*/scripts/*", "*/observe.py", "*/matrix.py"]
