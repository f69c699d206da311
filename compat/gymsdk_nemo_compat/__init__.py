"""NeMo Gym's commands `ng_run`, `ng_status` and `ng_collect_rollouts`, each of which runs the gymsdk command."""
