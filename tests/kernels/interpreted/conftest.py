"""Kernels in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m interpreted`. Other runs do not
collect these modules."""

from tests.support.kernels.interpreter import (  # noqa: F401
    ON_CPU,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_itemcollected,
)

collect_ignore_glob = [] if ON_CPU else ["test_*.py"]
