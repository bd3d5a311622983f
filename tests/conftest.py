"""One thread for the tiny models of the tests: more of them only wait for each other. And one cell with everybody."""

import os
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

if TYPE_CHECKING:
    from support.everybody import Everybody


@pytest.fixture(scope="session")
def everybody(tmp_path_factory: pytest.TempPathFactory) -> "Everybody":
    """The tiny target with every proposer there is; its heads are trained once for all tests."""
    from support.everybody import Everybody

    return Everybody(tmp_path_factory.mktemp("everybody"))
