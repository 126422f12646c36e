"""Low rank with the other transforms, kept in fewer bits, saved and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import *  # noqa
