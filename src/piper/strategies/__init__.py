"""Strategies: functions of directives, from degrees of parallelism or from the published JSON form."""

from piper.strategies.export_json import to_json
from piper.strategies.import_json import from_json
from piper.strategies.parallel import parallel
from piper.strategies.parallelize_plan import tensor_params

__all__ = ["from_json", "parallel", "tensor_params", "to_json"]
