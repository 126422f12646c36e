"""What Onward costs, each file one question.

    accumulate_time   what does a step over micro-batches cost, beside optax.MultiSteps?
    budget_time       how little memory does a GPT train in, for how much more time?
    check_finite_time what does it cost to look at every step for NaN and infinity?
    chunk_time        what do chunks of a loss head, and of attention, cost and save?
    derive_time       what does it cost to trace a function and derive its backward pass?
    first_step_time   how long does a person wait for the first step of a deep model?
    looking           what does it cost to look at a step: to save, compare, search, draw it?
    multi_device      what do more devices bring, and what does it cost to merge gradients over them?
    options_time      which options of the compiler, and how many cores, make a step fast on a CPU?
    parameter_server  what do parameter servers cost beside bare Ray, and what does a step send?
    partition_time    what does a model that is split over devices cost, beside a sharded jit by hand?
    pipeline_time     what does a pipeline cost beside one by hand, and how long do its stages wait?
    recompute_time    what does it cost to train in half the memory?
    serving           what does batching bring to a server, and does it lose or mix up an answer?
    step_time         does a step of Onward cost more than the one written by hand, or less?
    steps_to_loss     which optimizer needs the fewest steps to a loss?
    threads           what do threads bring that share one model?
    update_time       what does the update alone cost, beside optax and torch?

    python -m benchmarks                        all of them
    python -m benchmarks step_time              one
    python -m benchmarks --quick                tiny sizes: does everything still run?
    python -m benchmarks --json results.json    the numbers also as JSON
    python -m benchmarks --plot results.svg     and as a picture
    python -m benchmarks.device                 what it does on an accelerator, in a folder of its own

``onward bench`` does the same, but for ``steps_to_loss``, which takes minutes and has a command of its own,
``python -m benchmarks.steps_to_loss``. Other libraries are measured when they are installed:
``pip install -e ".[bench,plot]"``, and what is too large for the extra, ``pip install torch keras``.

Sides are measured in turn, in rounds, and compared round by round, so that whatever else the
machine does falls on all of them. The numbers are those of the machine they were measured on. Beside the
benchmarks: ``models`` are plain functions, ``workloads`` say what all sides compute, ``sides`` holds them in
the words of each library, ``worker`` gives a side its process, ``contest`` measures many, ``harness`` two,
``quiet`` sees whether anything else computes, ``load`` sends requests; ``track_gpt``, ``token_files`` and
``optimizer_rows`` are what the contest of optimizers keeps, reads and changes.
"""
