"""Options of the property tests."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workloads")
    group.addoption("--workloads", type=int, default=2000, help="random workloads to run with HashModel")
    group.addoption("--workload-seed", type=int, default=None, help="run the workload of this seed only")


@pytest.fixture
def one_thread():
    """Small tensors gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
