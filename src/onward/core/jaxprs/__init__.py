"""All that touches JAX's jaxpr types.

    equations   what stands in a jaxpr
    scopes      where an equation comes from
    tracing     functions become jaxprs, along an axis of devices where one is given
    devices     what devices exchange, what is equal on all of them, what is spread over them
    signature   equal for what computes the same
    reading     the Ops of a jaxpr
    body        what an Op computes

The rest of the house sees Bodies, types (``ShapeDtypeStruct``) and positions only. What it asks of them:

    collected   one computation of many arrays, however the numbers lie in them
    drawing     which random numbers are drawn, and what decides them
    edited      equations with operands exchanged, or with other jaxprs in them
    joining     many ops as one Body, and a Body as one call
    loops       what a loop hands from one turn to the next
    patterns    rows of a table looked up, the largest in each window
    retyped     an equation in another floating dtype
"""
