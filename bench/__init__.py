"""Measures keepstep beside its floors (memcpy, fio) and its peers: `make bench`, `make bench-gpu`.

Every figure is a ratio of medians from interleaved rounds of one run on one machine. No test is
ever timed. `python -m bench --help` lists the options; the results are in `bench/results/`.
"""
