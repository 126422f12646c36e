"""What Onward costs, each file one question.

    accumulate_time   what does a step over micro-batches cost, beside optax.MultiSteps?
    derive_time       what does it cost to trace a function and derive its backward pass?
    multi_device      what do more devices bring, and what does it cost to merge gradients over them?
    parameter_server  what do parameter servers cost beside bare Ray, and what does a step send?
    step_time         is a compiled Onward step as fast as one written by hand?
    threads           what do threads bring that share one model?
    update_time       what does the update alone cost, beside optax?

    python -m benchmarks                        all of them
    python -m benchmarks step_time              one
    python -m benchmarks --quick                tiny sizes: does everything still run?
    python -m benchmarks --json results.json    the numbers also as JSON

Two sides are measured in turn, in rounds, and compared round by round, so that whatever else the
machine does falls on both. The numbers are those of the machine they were measured on.
"""
