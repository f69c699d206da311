"""Worker processes for CPU-heavy functions: the `offload` decorator and the executors that run its functions."""
