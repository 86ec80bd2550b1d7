"""One thread for the tests of the cases."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Stock torch varies on one thread already, and these tests make very many tiny parallel regions: with several
    threads on a busy machine they would spend 30 times as long in waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
