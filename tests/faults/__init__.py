"""Faults planted in the source one at a time, and the tests that find them: how much does the suite see?

Two commands, run from the top of a checkout (Python 3.12 or newer):

    pytest -n 3 --dist loadfile -p tests.faults.record    # the suite once: which test enters which function
    python -m tests.faults.plant --count 120 --seed 0     # plants; runs the tests that enter the function

A fault is one small change of the syntax tree (``places``): a comparison flipped, a term dropped, an axis or
a number off by one, branches swapped, a lock not taken, a check skipped. Those of one seed are the same as
long as the source is, and they are spread over the folders by size. A fault is found when a test fails or
hangs. What is not found is printed as a diff: it wants a test, or a sentence why no test can see it.
"""
