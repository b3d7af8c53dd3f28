"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import leasehold


def test_package_is_typed_and_has_the_version_of_the_crate() -> None:
    folder = Path(leasehold.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
    if "site-packages" in folder.parts:
        assert importlib.metadata.version("leasehold") == leasehold.__version__
