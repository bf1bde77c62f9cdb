"""torchvision, importable beside any build of torch: `from common.vision import torchvision`.

torchvision's wheel carries compiled operators that are linked against CUDA. Beside a CPU-only torch they do not
load, and then `import torchvision` fails with "operator torchvision::nms does not exist", because it gives
`nms` and `qnms` shape rules without asking whether they are there. The course uses torchvision's Python parts
(datasets, transforms, models), which need no compiled operator: declaring the names of those two is enough.
Where torchvision imports by itself, this module does nothing.
"""

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    _library = torch.library.Library("torchvision", "FRAGMENT")  # kept: without it the names are gone again
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
