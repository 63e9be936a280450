"""What all tests share."""

import signal

from hypothesis import HealthCheck, settings

# Time says nothing about correctness on a busy machine; budgets have tests of their own.
settings.register_profile(
    "lmsmith", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("lmsmith")

# A background job of a script ignores Ctrl-C, and what it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
