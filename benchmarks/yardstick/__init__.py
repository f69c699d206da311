"""The yardstick: a stub model server, a load client, the floor, and the CPU and memory accounting of processes.

`benchmarks/performance.py`, `benchmarks/profile_run.py` and `benchmarks/soak.py` measure gymsdk with these modules. The
stub, the floor and the load client use uvloop and no framework, so that the measured process is what limits the rate.
"""
