"""The seams of usage and metrics. Without them drafting goes on, and responses have no prediction tokens."""

from __future__ import annotations

import functools
import logging

from vllm_integration.seams import install as compat
from vllm_integration.seams import source_probe

logger = logging.getLogger("vllm.gpu_align")


def install(group: compat.Group, wrappers: dict[str, compat.Wrapper]) -> bool:
    """`compat.install`; where a seam is missing one ERROR line and nothing changed. Raises only when strict."""
    try:
        compat.install(group, wrappers)
    except Exception as error:
        if compat.strict():
            raise
        logger.error("gpu_align reports no usage: %s: %s", type(error).__name__, error)
        return False
    return True


@functools.cache
def v1_is_whole() -> bool:
    """Whether the V1 runner and vLLM's scheduler have every seam of ours: then our scheduler is named.

    Read from the sources: this is asked where the configuration is made. If not, one WARNING line says what is
    missing (with `GPU_ALIGN_STRICT=1` this raises `SeamError`).
    """
    root = source_probe.installed_root()
    if root is None:
        return False
    seams = [seam for seam in compat.SEAMS if seam.group == "usage_v1"]
    bad = [status for status in source_probe.probe_sources(root, seams) if status.state != "found"]
    if not bad:
        return True
    what = "; ".join(f"{s.seam.module}.{s.seam.attribute} is {s.state}: {s.detail}" for s in bad)
    if compat.strict():
        raise compat.SeamError(what)
    logger.warning("gpu_align reports no usage with the V1 model runner: %s", what)
    return False
