"""What DTensor has worked out for ranks that are not there, to be forgotten before real ones are started."""

from torch.distributed.tensor import _redistribute, debug


def forget_layouts() -> None:
    """DTensor keeps what it has worked out for a mesh, with the sizes of all ranks and the names of groups. Real ranks,
    forked later from this process, would take them for theirs, and train wrongly without a word."""
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
