"""The application, which has the command ``with_lock`` and no models."""

from django.apps import AppConfig


class LeaseholdConfig(AppConfig):  # type: ignore[misc]
    name = "leasehold.django"
    label = "leasehold"
