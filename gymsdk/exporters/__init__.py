"""Send stored runs to Weights & Biases, MLflow or an OpenTelemetry collector, after a run or while it grows.

Each service has a module and an extra: `wandb`, `mlflow`, `otel`. The service's official SDK does the transfer, and its
own environment variables say where to: `WANDB_*`, `MLFLOW_TRACKING_URI`, `OTEL_EXPORTER_OTLP_*`.
"""

from __future__ import annotations

from gymsdk.exporters.base import EXTRAS, Exporter, ExportOptions, build_exporter, check_extra, export_run

__all__ = ["EXTRAS", "ExportOptions", "Exporter", "build_exporter", "check_extra", "export_run"]
