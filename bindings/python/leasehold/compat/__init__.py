"""Adapters for code that is written for other locks: `leasehold.compat.threading` and `leasehold.compat.redis`."""
