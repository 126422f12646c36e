"""The optimizers, one file per family.

    gradient_descent         one step size for all numbers
    sign                     the sign of the gradient alone
    adaptive                 a step size of its own for every number
    adam                     that, and momentum
    adam_variants            one part of Adam exchanged
    adam_extensions          one memory more than Adam
    layerwise                a step size for each layer, by norms
    factored                 slots of rows and columns in place of whole matrices
    proximal                 parameters that become exactly zero
    schedule_free            averages in place of a schedule
    learning_rate_free       a learning rate found on the way
    distance_over_gradients  the same, by the distance from the start
    muon, shampoo, soap, kron    matrices as matrices
    sophia, lbfgs            second derivatives, and a search along the line

``arithmetic``, ``norms``, ``matrices``, ``checks`` and ``line_search`` hold what several compute alike.
"""

from onward.core.first_use import from_stub

# The names are listed in __init__.pyi.
__getattr__, __dir__, __all__ = from_stub(__name__, "ow.optimizer")
