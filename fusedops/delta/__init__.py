"""Linear attention by the gated delta rule, and its decoding step."""

from fusedops.delta.op import gated_delta_rule, gated_delta_rule_step

__all__ = [
    "gated_delta_rule",
    "gated_delta_rule_step",
]
