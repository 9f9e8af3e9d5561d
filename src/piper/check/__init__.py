"""The plan checker: what is proved of a plan before a run, each failure with a witness."""

from piper.check.parties import Party, World, compressed, expanded
from piper.check.peak import most_bytes
from piper.check.problem import Problem
from piper.check.prove import PROOFS, check_names, check_plan, problems
from piper.check.report import Report

__all__ = [
    "PROOFS",
    "Party",
    "Problem",
    "Report",
    "World",
    "check_names",
    "check_plan",
    "compressed",
    "expanded",
    "most_bytes",
    "problems",
]
