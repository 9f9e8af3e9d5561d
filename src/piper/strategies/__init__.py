"""Strategies: functions of directives, from degrees of parallelism."""

from piper.strategies.parallel import parallel

__all__ = ["parallel"]
