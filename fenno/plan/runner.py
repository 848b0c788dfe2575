"""Which of vLLM's two model runners a model gets, by the version, and what that one keeps beside weights and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fenno.plan.gpus import GIB

# The variable by which vLLM is told which, and the first release in which V2 runs dense models, and then all of them. That one also
# takes the CUDA graphs of V2 out of its share; before, they lay beside it.
VARIABLE, DENSE, ALL = "VLLM_USE_V2_MODEL_RUNNER", (0, 25), (0, 29)
# Before `DENSE`, and before `ALL` besides the dense ones.
EARLY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}
WITH_EXPERTS = {"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"}


class Runner(NamedTuple):
    """`graphs`: bytes of the captured CUDA graphs. `counted`: whether the engine takes them out of its share of the memory.
    `logit`: bytes that its sampler keeps of a logit at its peak. Allowances, from the starts that docs/plan.md names."""

    name: str
    counted: bool
    graphs: int
    logit: int


# Of 14 bytes one copy has 16 bits, three have 32.
V1 = Runner("V1", counted=True, graphs=int(0.5 * GIB), logit=14)
V2 = Runner("V2", counted=True, graphs=1 * GIB, logit=8)


def of(release: tuple[int, int] | None, config: Mapping[str, Any], dense: bool, env: Mapping[str, str]) -> Runner:
    """The runner of a model under a release of vLLM; without one (None) that of today's, which is V2 for every model."""
    if release is None or release >= ALL:
        return V1 if env.get(VARIABLE) == "0" else V2
    named = {*(config.get("architectures") or ())}
    usual = bool(named & WITH_EXPERTS) or (dense if release >= DENSE else bool(named & EARLY))
    asked = env.get(VARIABLE)
    return V2._replace(counted=False) if (usual if asked is None else asked == "1") else V1
