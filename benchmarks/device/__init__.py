"""What does Onward do on the device at hand: is it right, how fast, in how much memory, on how many?

One command for whatever JAX shows, one GPU, several or the CPU, in at most eight minutes:

    python -m benchmarks.device                      all parts; onward bench device does the same
    python -m benchmarks.device right step           some
    python -m benchmarks.device --json results.json  the numbers also as JSON, after each part
    python -m benchmarks.device --quick              tiny sizes, in this process: does everything still run?

    right    gradients, networks under every transform, optimizers, devices, other libraries' models, beside
             float64 on the host
    step     the time of a step beside the best one written by hand and torch.compile; tokens/s, MFU
    first    seconds from minimize to the end of the first step
    memory   peak bytes, measured and foretold by ow.memory; the largest batch that fits
    devices  every merge on all devices, by shard_map and pmap, beside a pmap written by hand and one device

Each case of a part runs in a process of its own: what runs out of memory, crashes or hangs is named with the
reason, and the rest goes on. On a CPU, and with ``--quick``, sizes are tiny. torch joins in where it is
installed with a build for the device. The command ends with another status than 0 if anything is unequal.

A part is a file. Beside them: ``part`` is what a part is and what it tells, ``apart`` gives a case its
process, ``works`` and ``networks`` say what is trained, ``steps`` holds the sides, ``switches`` what compile
does by itself, ``peaks`` the FLOP/s of devices, ``functions`` the gradients, ``precision`` the bounds.
"""
