import pytest

from minikv.default_model import default_model_folder


@pytest.fixture(scope="session")
def default_folder():
    return default_model_folder()
