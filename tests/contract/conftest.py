"""Every form and every base, as fixtures."""

import optax
import pytest
from contract_bases import BASES, FORMS, Form


@pytest.fixture(params=FORMS)
def form(request) -> Form:
    return FORMS[request.param]


@pytest.fixture(params=BASES)
def base_name(request) -> str:
    return request.param


@pytest.fixture
def base(base_name) -> optax.GradientTransformation:
    return BASES[base_name]()
