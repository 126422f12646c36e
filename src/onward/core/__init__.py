"""The Program: its data, the rules it keeps, and the walks that count, show and lower it.

words       the closed sets of words
variable    a value, by its name and type
program     Op, Program, Recipe: frozen data
primitives  one table of what each primitive of JAX is
jaxprs      the one place that touches JAX's jaxpr types
source      the user's file and line behind an op
structure   people's containers and the Variables at their leaves
recipe      how a Program is built again from what it is made of
transform   what a transform is
check       the rules of the graph
walk        ancestors, liveness, prune, select
homes       the scope in which people look for an op
flops       how many operations a primitive takes
cost        what an op costs: operations, bytes read, written, exchanged
steps       ops taken apart, one step for each equation
liveness    what lies in memory while a step runs
lower       a Program as one pure function
show        the text view
"""
