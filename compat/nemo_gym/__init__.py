"""The part of NeMo Gym's Python API that trainers import, on top of gymsdk.

NeMo RL and verl start the servers of a training run with `nemo_gym.cli.RunHelper` and send rows to them with
`nemo_gym.rollout_collection.RolloutCollectionHelper`. This package provides the same names with the same behavior; the
servers are those of gymsdk. It must not be installed beside NeMo Gym.
"""
