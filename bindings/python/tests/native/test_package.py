"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

import leasehold


def test_package_is_typed_and_has_the_version_of_the_crate() -> None:
    folder = Path(leasehold.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
    if "site-packages" in folder.parts:
        assert importlib.metadata.version("leasehold") == leasehold.__version__


def test_wheel_has_at_most_six_megabytes() -> None:
    wheel = os.environ.get("LEASEHOLD_WHEEL")
    if wheel is None:
        pytest.skip("LEASEHOLD_WHEEL names no wheel of a release")
    assert Path(wheel).stat().st_size <= 6_000_000
