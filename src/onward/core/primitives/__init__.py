"""What each primitive of JAX is, in one table; whoever walks over ops asks it, and holds no names itself.

    traits   what can be said of a primitive
    table    one row for each

>>> from onward.core.primitives.table import of
>>> of("exp").is_elementwise, of("psum").exchanges, of("made_up").is_elementwise
(True, <Exchanges.SUM: 1>, False)
"""
