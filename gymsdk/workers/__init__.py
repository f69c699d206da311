"""Where an author's code that takes its time runs: warm processes for offloaded functions, threads for plain hooks."""
