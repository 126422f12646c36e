"""The traits of JAX's primitives, in one table; walks over ops ask it, and hold no names themselves.

    traits   what can be said of a primitive
    table    one row for each

>>> from onward.core.primitives.table import of
>>> of("exp").is_elementwise, of("psum").exchanges, of("made_up").is_elementwise
(True, <Exchanges.SUM: 1>, False)
"""
