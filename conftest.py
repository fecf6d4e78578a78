"""For every test of the repository."""

from hypothesis import settings

# Machines that run tests are shared and noisy; the time limit of each test is pytest-timeout's.
settings.register_profile("commhooks", deadline=None)
settings.load_profile("commhooks")
