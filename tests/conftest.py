"""One thread per process: ranks and test workers share few cores."""

import torch

torch.set_num_threads(1)


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
