"""NeMo Gym's commands, carried out by gymsdk."""
